"""A pipeline stage's parts of the model, and Megatron's schedules over them. Called by
trainer/megatron/policy.py.

With trainer.virtual_stages = v a stage has v chunks of consecutive layers, which it runs in turns: the first
chunks of all stages come first in the model, then the second ones (the interleaved schedule, Narayanan et
al., arXiv 2104.04473, section 2.2). Micro-batches then come in multiples of the number of stages.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from laminar_hpc.config.system_schema import TrainerConfig

T = TypeVar("T")


class ModelChunks(torch.nn.ModuleList):
    """A stage's chunks, in the order of their layers, as one module."""

    def sharded_state_dict(self, metadata: dict, prefix: str = "") -> dict:
        """What Megatron's checkpoints are told of the parameters; their keys there know no chunks."""
        parts = enumerate(self)
        return {str(i): chunk.sharded_state_dict(prefix=prefix, metadata=metadata) for i, chunk in parts}


def virtual_size(trainer: TrainerConfig) -> int | None:
    """Chunks of a stage, as Megatron wants it: None for one."""
    return trainer.virtual_stages if trainer.virtual_stages > 1 else None


def schedule_settings(trainer: TrainerConfig) -> dict[str, object]:
    """Megatron's settings of the schedule. What chunks hand on travels beside the computation: the batched
    exchange mixes up the two directions of two stages, which are each other's neighbours twice."""
    if trainer.virtual_stages == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": trainer.virtual_stages,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def stage_module(chunks: Sequence[GPTModel]) -> torch.nn.Module:
    """The chunks as one module: where there is one, that."""
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def multiple_of_microbatches() -> int:
    """What their number must be a multiple of."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
        return 1
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def run_schedule(
    step: Callable[[Iterator[T], torch.nn.Module], tuple[torch.Tensor, Callable]],
    models: Sequence[torch.nn.Module],
    data: Sequence[T],
    tokens_of: Callable[[T], int],
    forward_only: bool,
) -> list:
    """Megatron's schedule over micro-batches; what the last stage collected of each, else nothing. Each is
    asked for once, and each of the `models` runs it. With stages all have as many tokens, counted over
    the context-parallel ranks, of which Megatron takes a rank's share. A forward pass alone is filled up with
    the first one where their number has to be a multiple."""
    each = iter(data)
    first = next(each)
    missing = -len(data) % multiple_of_microbatches() if forward_only else 0
    items = itertools.chain((first,), each, itertools.repeat(first, missing))
    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=list(itertools.tee(items, len(models))) if len(models) > 1 else items,
        model=list(models),
        num_microbatches=len(data) + missing,
        seq_length=tokens_of(first),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return list(found)[: len(data)]
