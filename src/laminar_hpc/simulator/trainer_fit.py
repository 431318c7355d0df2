"""The trainer of a run of our own on so many GPUs: the settings that `laminar plan` simulates and writes into
its experiment file."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from laminar_hpc.config.adapters import rank_adapter_parameters
from laminar_hpc.config.experts import expert_shards, experts_of
from laminar_hpc.config.models import kv_heads, trainer_bytes
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tables import Gpu, Model
from laminar_hpc.simulator.trainer_cost import Layout, batch_sample, step_seconds

SHARE = 0.9  # of a GPU's memory that a planned trainer fills; a start refuses above config/memory.py's USABLE
_WIDTH = 2  # bytes of a bfloat16
_REPEATED = {
    "full": 1.0
}  # the share of the forward pass that backward repeats; selective repeats no products
RECOMPUTATIONS = ("none", "selective", "full")
_TENSOR = (8, 4, 2, 1)
_STAGES = (1, 2, 4, 8)
_CONTEXT = (1, 2, 4, 8)
_EXPERT = (1, 2, 4, 8, 16, 32, 64)
_CHUNKS = range(1, 9)  # virtual stages; more of them pass on more than they save
_PROMPT_MARGIN = 1024  # tokens: prompts are longer than their mean
_PACK_MULTIPLE = 2048
_FOUND: dict[Any, TrainerConfig | None] = {}  # the planner asks for the same again and again


def tokens_per_microbatch(w: WorkloadConfig, context: int = 1) -> int:
    """Room for the longest trajectory and a prompt above the mean, on each of `context` ranks, rounded up."""
    return math.ceil((w.longest + _PROMPT_MARGIN) / (context * _PACK_MULTIPLE)) * _PACK_MULTIPLE


def shards(model: Model, tensor: int) -> bool:
    """Whether heads, KV heads and feed-forward width can be split over `tensor` ranks, as in a run. Of
    experts those that every token uses; the others stay whole (`expert_sizes`)."""
    shape, experts = model.config, experts_of(model.config)
    width = experts.shared_width if experts else shape["intermediate_size"]
    return all(n % tensor == 0 for n in (shape["num_attention_heads"], kv_heads(shape), width))


def expert_sizes(model: Model, tensor: int, ranks: int) -> list[int]:
    """Of `ranks` in a pipeline stage those that may share its layers' experts, whole ones each; 1 for a dense
    model."""
    experts = experts_of(model.config)
    if experts is None:
        return [1]
    return [n for n in _EXPERT if experts.count % n == 0 and ranks % n == 0 and (n > 1 or tensor == 1)]


def serves(model: Model, tensor: int) -> bool:
    """Whether an engine can split the model over `tensor` ranks, as config/rules.py asks: more ranks than
    key-value heads hold the same ones; of experts each has a part."""
    shape, heads, experts = model.config, kv_heads(model.config), experts_of(model.config)
    widths = [experts.width, experts.shared_width] if experts else [shape["intermediate_size"]]
    whole = all(n % tensor == 0 for n in (shape["num_attention_heads"], *widths))
    return whole and max(heads, tensor) % min(heads, tensor) == 0


def fitting_trainer(
    model: Model, gpu: Gpu, gpus: int, w: WorkloadConfig, lora: LoraConfig | None = None
) -> TrainerConfig | None:
    """For each TP x CP within a machine the fewest pipeline stages that config/models.py's estimate puts into
    SHARE of the memory, with all activations kept where they fit, else recomputed; with every number of
    virtual stages and of ranks that share the experts; of these the fastest by the cost model. Context
    parallelism leaves a machine where no layout fits without that. None: no layout fits."""
    lora = lora or LoraConfig()
    key = (model, gpu, gpus, dataclasses.astuple(w), dataclasses.astuple(lora))
    if key not in _FOUND:
        each = [_fits(model, gpu, gpus, n, gpu.machine // n, w, lora) for n in _CONTEXT]
        fits = [found for fit in each for found in fit]
        if not fits:
            across = (_fits(model, gpu, gpus, n, gpu.machine, w, lora) for n in _CONTEXT)
            fits = next((fit for fit in across if fit), [])
        sample = batch_sample(w) if len(fits) > 1 else []

        def seconds(t: TrainerConfig) -> float:
            return step_seconds(model, gpu, gpus, layout_of(t, lora), w, sample, DEFAULT) if sample else 0.0

        _FOUND[key] = min(fits, key=seconds, default=None)
    return _FOUND[key]


def _fits(
    model: Model, gpu: Gpu, gpus: int, context: int, tensor_max: int, w: WorkloadConfig, lora: LoraConfig
) -> list[TrainerConfig]:
    heads = model.config["num_attention_heads"]
    inside = min(gpus, gpu.machine)  # a tensor-parallel group is on one machine
    able = [n for n in _TENSOR if n <= tensor_max and gpus % (n * context) == 0 and inside % n == 0]
    sizes = [n for n in able if shards(model, n) and heads % (n * context) == 0]
    return [found for n in sizes for found in _fewest_stages(model, gpu, gpus, n, context, w, lora)]


def _fewest_stages(
    model: Model, gpu: Gpu, gpus: int, tensor: int, context: int, w: WorkloadConfig, lora: LoraConfig
) -> list[TrainerConfig]:
    """Every layout with the fewest stages that fit; empty where none does."""
    for stages in _STAGES:
        copy_of_model = tensor * context * stages
        if gpus % copy_of_model or stages > model.layers:
            continue
        ranks = gpus // copy_of_model
        if ranks > w.prompts_per_step * w.samples_per_prompt // w.updates_per_step:
            continue  # an update has fewer trajectories than there are ranks
        plain = TrainerConfig(
            tensor_parallel=tensor,
            context_parallel=context,
            pipeline_parallel=stages,
            data_parallel=ranks,
            distributed_optimizer=True,
            tokens_per_microbatch=tokens_per_microbatch(w, context),
            gpu_memory_gigabytes=gpu.memory / 1e9,
        )
        fits = (_with_room(model, gpu, each, lora) for each in _divided(model, plain))
        if found := [fit for fit in fits if fit]:
            return found
    return []


def _divided(model: Model, plain: TrainerConfig) -> Iterator[TrainerConfig]:
    """With the experts over every number of ranks, and the stages in every number of chunks."""
    stages = plain.pipeline_parallel
    for experts in expert_sizes(model, plain.tensor_parallel, plain.ranks // stages):
        for chunks in _CHUNKS if stages > 1 else (1,):
            if chunks == 1 or model.layers % (stages * chunks) == 0:
                yield dataclasses.replace(plain, expert_parallel=experts, virtual_stages=chunks)


def _with_room(model: Model, gpu: Gpu, trainer: TrainerConfig, lora: LoraConfig) -> TrainerConfig | None:
    """With the least recomputation that lets it fit; None where none does."""
    choices = (dataclasses.replace(trainer, recompute_activations=r) for r in RECOMPUTATIONS)
    adapter, usable = rank_adapter_parameters(model.config, lora, trainer), SHARE * gpu.memory
    fits = (each for each in choices if trainer_bytes(model.config, _WIDTH, each, adapter) <= usable)
    return next(fits, None)


def layout_of(trainer: TrainerConfig, lora: LoraConfig | None = None) -> Layout:
    """The trainer's parallel sizes as the cost model wants them; its ranks get trajectories by their work
    (trainer/step/packing.py), and its last stage has the output layer beside its layers."""
    return Layout(
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.data_parallel,
        trainer.pack_tokens,
        _REPEATED.get(trainer.recompute_activations, 0.0),
        balanced=True,
        experts=expert_shards(trainer),
        even=False,
        context=trainer.context_parallel,
        chunks=trainer.virtual_stages,
        lora=lora or LoraConfig(),
    )
