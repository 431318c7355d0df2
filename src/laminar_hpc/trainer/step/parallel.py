"""What the trainer world's ranks share of one computation."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.trainer.megatron.chunks import multiple_of_microbatches
from laminar_hpc.trainer.step.packing import plan_microbatches


class RankShare(NamedTuple):
    """What this data-parallel rank trains of a mini-batch: its micro-batches, as indices in the batch, and
    the number of tokens that each is to be filled up to: pipeline stages pass on tensors of one shape; else
    0."""

    plan: list[list[int]]
    size: int


def own_share(
    lengths: list[int], members: list[int], tokens_per_microbatch: int, even: float = math.inf
) -> RankShare:
    """Of the mini-batch of these members of a batch; `lengths`: tokens of each sequence of the batch; `even`
    as in packing.py's `work`. Context-parallel ranks have the same share."""
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    of_members, multiple = [lengths[i] for i in members], multiple_of_microbatches()
    own = plan_microbatches(of_members, ranks, tokens_per_microbatch, even, multiple)[rank]
    plan = [[members[place] for place in part] for part in own]
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return RankShare(plan, 0)
    return RankShare(plan, max(sum(lengths[i] for i in part) for part in plan))


def total(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum over the data-parallel ranks of what only their last pipeline stages know; `tensor` and the sum
    are on the CPU, the ranks' communication on `device`."""
    own = tensor if parallel_state.is_pipeline_last_stage() else torch.zeros_like(tensor)
    return reduced(own.to(device)).cpu()


def reduced(tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """In place, over the data-parallel ranks and the pipeline stages. Tensor- and context-parallel ranks have
    the same numbers; of the stages only the last has any, the others bring zeros."""
    for group in (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        dist.all_reduce(tensor, operation, group=group)
    return tensor


def largest_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """In place, the largest values over all ranks of the trainer world: what only some
    ranks know is then known to all, to the last bit."""
    for group in (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    ):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor
