"""Megatron's process groups. Made by trainer/megatron/policy.py.

Megatron asks for about 20 groups, of which one rank alone is in each where a size is 1. Every group costs
threads that wake all the time (gloo's 100 times a second), a communicator and a meeting of all ranks. So the
groups of one rank are the same one, and copies in gloo are not made: Megatron needs them for other formats of
checkpoints than those of optimizer_shards.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.megatron.chunks import virtual_size
from laminar_hpc.trainer.megatron.cpu import replaced
from laminar_hpc.trainer.megatron.experts import expert_tensor_parallel


def make_groups(config: RunConfig) -> None:
    """Collective; does nothing where they are made."""
    if parallel_state.model_parallel_is_initialized():
        return
    create = parallel_state.create_group
    alone: dict[int, Any] = {0: dist.group.WORLD} if dist.get_world_size() == 1 else {}

    def create_group(ranks: Sequence[int], *args: Any, **more: Any) -> Any:
        if len(ranks) > 1:
            return create(ranks, *args, **more)
        if ranks[0] not in alone:
            alone[ranks[0]] = create(ranks, *args, **more)
        return alone[ranks[0]]

    with replaced(parallel_state, "create_group", create_group):
        parallel_state.initialize_model_parallel(
            config.trainer.tensor_parallel,
            config.trainer.pipeline_parallel,
            virtual_size(config.trainer),
            context_parallel_size=config.trainer.context_parallel,
            expert_model_parallel_size=config.trainer.expert_parallel,
            expert_tensor_parallel_size=expert_tensor_parallel(config),
            distributed_timeout_minutes=math.ceil(config.cluster.join_timeout_seconds / 60),
            create_gloo_process_groups=False,
        )
