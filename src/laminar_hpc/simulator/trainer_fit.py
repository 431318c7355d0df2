"""The trainer of a run of our own on so many GPUs: the settings that `laminar plan` simulates and writes into
its experiment file."""

import math

from laminar_hpc.config.models import known_models, kv_heads, trainer_bytes
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.constants import Gpu, Model
from laminar_hpc.simulator.cost import Layout
from laminar_hpc.simulator.schema import WorkloadConfig

SHARE = 0.9  # of a GPU's memory that a planned trainer fills; a start refuses above config/memory.py's USABLE
_WIDTH = 2  # bytes of a bfloat16
_TENSOR = (8, 4, 2, 1)
_STAGES = (1, 2, 4, 8)
_PROMPT_MARGIN = 1024  # tokens: prompts are longer than their mean
_PACK_MULTIPLE = 2048


def tokens_per_microbatch(w: WorkloadConfig) -> int:
    """Room for the longest trajectory and a prompt above the mean, rounded up."""
    return math.ceil((w.longest + _PROMPT_MARGIN) / _PACK_MULTIPLE) * _PACK_MULTIPLE


def shards(model: Model, tensor: int) -> bool:
    """Whether heads, key-value heads and the feed-forward width can be split over `tensor` ranks, as
    config/check.py asks."""
    shape = known_models()[model.hf]
    return all(
        n % tensor == 0 for n in (shape["num_attention_heads"], kv_heads(shape), shape["intermediate_size"])
    )


def fitting_trainer(model: Model, gpu: Gpu, gpus: int, w: WorkloadConfig) -> TrainerConfig | None:
    """TP as wide as a machine and the heads allow, then the fewest pipeline stages, then all activations kept
    rather than recomputed: the first that config/models.py's estimate puts into SHARE of the memory. None: no
    layout fits."""
    tensor = next(n for n in _TENSOR if gpus % n == 0 and shards(model, n))
    for stages in _STAGES:
        if gpus % (tensor * stages):
            continue
        ranks = gpus // (tensor * stages)
        if ranks > w.prompts_per_step * w.samples_per_prompt // w.updates_per_step:
            continue  # an update has fewer trajectories than there are ranks
        for recompute in (False, True):
            trainer = TrainerConfig(
                tensor_parallel=tensor,
                pipeline_parallel=stages,
                data_parallel=ranks,
                distributed_optimizer=True,
                recompute_activations=recompute,
                tokens_per_microbatch=tokens_per_microbatch(w),
                gpu_memory_gigabytes=gpu.memory / 1e9,
            )
            if trainer_bytes(known_models()[model.hf], _WIDTH, trainer) <= SHARE * gpu.memory:
                return trainer
    return None


def layout_of(trainer: TrainerConfig) -> Layout:
    """The trainer's parallel sizes as the cost model wants them."""
    return Layout(trainer.tensor_parallel, trainer.pipeline_parallel, trainer.data_parallel)
