"""A trainer of one rank that saves checkpoints: `save_checkpoint.py MODEL RUN_DIR GANG STEP ...`. Started by
test_checkpoint.py, which watches or stops it."""

import sys
from pathlib import Path

import torch.distributed as dist

from helpers.trainer import tiny
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner


def main(model: Path, run_dir: Path, trainer_generation: int, steps: list[int]) -> None:
    from megatron.core import (
        parallel_state,  # behind laminar_hpc.trainer: by itself it imports wandb for 20 s
    )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = tiny.make_config(model)
    policy = MegatronPolicy(config)
    checkpointer = Checkpointer(
        run_dir, policy, Learner(config, policy), Welcome("run", trainer_generation=trainer_generation)
    )
    for step in steps:
        checkpointer.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), [int(step) for step in sys.argv[4:]])
