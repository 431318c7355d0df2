"""The trainer of a run of our own on so many GPUs: the settings that `laminar plan` simulates and writes into
its experiment file."""

import dataclasses
import math
from typing import Any

from laminar_hpc.config.models import kv_heads, trainer_bytes
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
_TENSOR = (8, 4, 2, 1)
_STAGES = (1, 2, 4, 8)
_CONTEXT = (1, 2, 4, 8)
_PROMPT_MARGIN = 1024  # tokens: prompts are longer than their mean
_PACK_MULTIPLE = 2048
_FOUND: dict[Any, TrainerConfig | None] = {}  # the planner asks for the same again and again


def tokens_per_microbatch(w: WorkloadConfig, context: int = 1) -> int:
    """Room for the longest trajectory and a prompt above the mean, on each of `context` ranks, rounded up."""
    return math.ceil((w.longest + _PROMPT_MARGIN) / (context * _PACK_MULTIPLE)) * _PACK_MULTIPLE


def shards(model: Model, tensor: int) -> bool:
    """Whether heads, KV heads and feed-forward width can be split over `tensor` ranks, as in a run."""
    shape = model.config
    return all(
        n % tensor == 0 for n in (shape["num_attention_heads"], kv_heads(shape), shape["intermediate_size"])
    )


def serves(model: Model, tensor: int) -> bool:
    """Whether an engine can split the model over `tensor` ranks, as config/rules.py asks: more ranks than
    key-value heads hold the same ones."""
    shape, heads = model.config, kv_heads(model.config)
    whole = all(shape[name] % tensor == 0 for name in ("num_attention_heads", "intermediate_size"))
    return whole and max(heads, tensor) % min(heads, tensor) == 0


def fitting_trainer(model: Model, gpu: Gpu, gpus: int, w: WorkloadConfig) -> TrainerConfig | None:
    """For each TP within a machine the fewest pipeline stages that config/models.py's estimate puts into
    SHARE of the memory, with all activations kept where they fit, else recomputed; of these the fastest by
    the cost model. Micro-batches are split over context-parallel ranks where no layout fits without them.
    None: no layout fits."""
    key = (model, gpu, gpus, dataclasses.astuple(w))
    if key not in _FOUND:
        tensors = [n for n in _TENSOR if gpus % n == 0 and n <= gpu.machine]
        every = (_fits(model, gpu, gpus, tensors, context, w) for context in _CONTEXT)
        fits = next((found for found in every if found), [])
        sample = batch_sample(w) if len(fits) > 1 else []
        _FOUND[key] = min(
            fits,
            key=lambda t: step_seconds(model, gpu, gpus, layout_of(t), w, sample, DEFAULT) if sample else 0.0,
            default=None,
        )
    return _FOUND[key]


def _fits(
    model: Model, gpu: Gpu, gpus: int, tensors: list[int], context: int, w: WorkloadConfig
) -> list[TrainerConfig]:
    heads = model.config["num_attention_heads"]
    sizes = [n for n in tensors if shards(model, n) and heads % (n * context) == 0]
    return [found for n in sizes if (found := _fewest_stages(model, gpu, gpus, n, context, w))]


def _fewest_stages(
    model: Model, gpu: Gpu, gpus: int, tensor: int, context: int, w: WorkloadConfig
) -> TrainerConfig | None:
    for stages in _STAGES:
        copy_of_model = tensor * context * stages
        if gpus % copy_of_model or stages > model.layers:
            continue
        ranks = gpus // copy_of_model
        if ranks > w.prompts_per_step * w.samples_per_prompt // w.updates_per_step:
            continue  # an update has fewer trajectories than there are ranks
        for recompute in ("none", "selective", "full"):
            trainer = TrainerConfig(
                tensor_parallel=tensor,
                context_parallel=context,
                pipeline_parallel=stages,
                data_parallel=ranks,
                distributed_optimizer=True,
                recompute_activations=recompute,
                tokens_per_microbatch=tokens_per_microbatch(w, context),
                gpu_memory_gigabytes=gpu.memory / 1e9,
            )
            if trainer_bytes(model.config, _WIDTH, trainer) <= SHARE * gpu.memory:
                return trainer
    return None


def layout_of(trainer: TrainerConfig) -> Layout:
    """The trainer's parallel sizes as the cost model wants them; its ranks get trajectories by their work
    (trainer/step/packing.py), and its last stage has the output layer beside its layers."""
    return Layout(
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.data_parallel,
        trainer.pack_tokens,
        _REPEATED.get(trainer.recompute_activations, 0.0),
        balanced=True,
        even=False,
        context=trainer.context_parallel,
        chunks=trainer.virtual_stages,
    )
