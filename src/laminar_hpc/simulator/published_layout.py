"""The trainer's layout of a published system, whose own is not known to us: of those that fit the memory the
fastest, as somebody who tunes it would find. trainer_fit.py has that of a run of our own."""

import math
from collections.abc import Iterator
from dataclasses import replace

from laminar_hpc.config.models import state_bytes
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.lora import trained_part
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tables import Gpu, Model
from laminar_hpc.simulator.trainer_cost import Layout, batch_sample, step_seconds

_TENSOR, _STAGES = (1, 2, 4, 8), (1, 2, 4, 8, 16)
_SPREADS = (1, 2, 4, 8)  # NVLink domains that share a layer's experts
_MODEL_BYTES = 6.0  # of a parameter on each model-parallel rank: bf16 weights, fp32 gradients


def layouts(
    model: Model,
    gpu: Gpu,
    gpus: int,
    c: Constants,
    lora: LoraConfig | None = None,
    optimizer: float | None = None,
) -> list[Layout]:
    """For each tensor parallelism within a machine the fewest pipeline stages with which weights, gradients
    and optimizer fit into their share of the memory. Experts are shared by the GPUs that NVLink joins, and by
    two, four and eight times as many. `optimizer`: its bytes for a parameter, None = all of them."""
    optimizer = c.trainer_bytes_per_parameter - _MODEL_BYTES if optimizer is None else optimizer
    room, found = c.trainer_memory_share * gpu.memory, list[Layout]()
    for spread in _SPREADS if model.experts else (1,):
        for tensor in _TENSOR:
            divided = _by_stages(model, gpu, gpus, tensor, spread * gpu.domain, lora or LoraConfig())
            fits = (each for each in divided if _held(model, each, optimizer) <= room)
            if (fit := next(fits, None)) and fit not in found:
                found.append(fit)
    return found


def _by_stages(
    model: Model, gpu: Gpu, gpus: int, tensor: int, sharing: int, lora: LoraConfig
) -> Iterator[Layout]:
    """With more and more stages; at most `sharing` GPUs share the experts."""
    if tensor > gpu.machine or model.heads % tensor:
        return
    for stages in _STAGES:
        if gpus % (tensor * stages) or stages > model.layers:
            continue
        layout = Layout(tensor, stages, gpus // (tensor * stages), lora=lora)
        if model.experts:
            whole = math.gcd(model.experts, gpus // stages)
            experts = max(n for n in range(1, min(whole, sharing) + 1) if whole % n == 0)
            layout = replace(layout, experts=experts, packed=True)
        yield layout


def _held(model: Model, layout: Layout, optimizer: float) -> float:
    """Bytes of weights, gradients and optimizer on a GPU; experts are divided over those that share them."""
    parts = layout.tensor * layout.stages
    if layout.lora.rank:
        adapter = trained_part(model, layout.lora).parameters / parts
        return 2.0 * model.parameters / parts + state_bytes(adapter, _MODEL_BYTES, optimizer, layout.ranks)
    shared = (model.parameters - model.expert_parameters) / parts
    held = state_bytes(shared, _MODEL_BYTES, optimizer, layout.ranks)
    if not model.experts:
        return held
    copies = layout.tensor * layout.ranks // layout.experts
    routed = model.expert_parameters / (layout.stages * layout.experts)
    return held + state_bytes(routed, _MODEL_BYTES, optimizer, copies)


def trainer_layout(
    model: Model, gpu: Gpu, gpus: int, w: WorkloadConfig, c: Constants, lora: LoraConfig | None = None
) -> Layout | None:
    """The one whose updates are fastest. None: no layout holds weights, gradients and optimizer."""
    fits = [fit for n in _counts(model, gpus) for fit in layouts(model, gpu, n, c, lora)]
    return _fastest(model, gpu, gpus, fits, w, c)


def offloaded_layout(
    model: Model, gpu: Gpu, gpus: int, w: WorkloadConfig, c: Constants, lora: LoraConfig | None = None
) -> Layout:
    """Where no layout holds the optimizer it is in the host's memory, at no cost here; where none holds
    weights and gradients either, they are divided as far as they can be, at no cost again."""
    fits = [fit for n in _counts(model, gpus) for fit in layouts(model, gpu, n, c, lora, optimizer=0.0)]
    if not fits:
        sizes = [_by_stages(model, gpu, gpus, n, gpu.domain, lora or LoraConfig()) for n in _TENSOR]
        every = [layout for size in sizes for layout in size]
        most = max(layout.tensor * layout.stages for layout in every)
        fits = [layout for layout in every if layout.tensor * layout.stages == most]
    found = _fastest(model, gpu, gpus, fits, w, c)
    assert found is not None  # a copy of the model on each GPU is among them
    return found


def _counts(model: Model, gpus: int) -> set[int]:
    """GPUs that a layout may use: all; of a number over which experts divide badly the power of two, or half
    of them."""
    return {gpus, 1 << (gpus.bit_length() - 1), max(1, gpus // 2)} if model.experts else {gpus}


def _fastest(
    model: Model, gpu: Gpu, gpus: int, fits: list[Layout], w: WorkloadConfig, c: Constants
) -> Layout | None:
    """Also of those that leave ranks without a trajectory of an update."""
    sample = batch_sample(w)
    tried = [replace(layout, tokens=w.longest) for layout in fits]
    return min(tried, key=lambda each: step_seconds(model, gpu, gpus, each, w, sample, c), default=None)
