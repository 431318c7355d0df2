"""What the trainer world's ranks share of one computation."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.trainer.step.packing import plan_microbatches


def own_microbatches(lengths: list[int], tokens_per_microbatch: int) -> tuple[list[list[int]], int]:
    """This data-parallel rank's micro-batches, as positions in `lengths` (tokens of each sequence), and the
    number of tokens that each is to be filled up to: pipeline stages pass on tensors of one shape; else 0."""
    ranks = parallel_state.get_data_parallel_world_size()
    plan = plan_microbatches(lengths, ranks, tokens_per_microbatch)[parallel_state.get_data_parallel_rank()]
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return plan, 0
    return plan, max(sum(lengths[i] for i in part) for part in plan)


def reduced(tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """In place, over the data-parallel ranks and the pipeline stages. Tensor-parallel ranks have the same
    numbers; of the stages only the last has any, the others bring zeros."""
    for group in (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        dist.all_reduce(tensor, operation, group=group)
    return tensor
