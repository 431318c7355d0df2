"""A trainer of one rank that saves checkpoints: `save_checkpoint.py MODEL RUN_DIR STEP ...`. Started by
test_checkpoint.py under strace; measures with the seconds that it prints."""

import sys
import time
from pathlib import Path

import tiny
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner


def main(model: Path, run_dir: Path, steps: list[int]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = tiny.make_config(model)
    policy = MegatronPolicy(config)
    checkpointer = Checkpointer(run_dir, policy, Learner(config, policy))
    for step in steps:
        begun = time.monotonic()
        checkpointer.save(step)
        print(f"step {step} saved in {time.monotonic() - begun:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(step) for step in sys.argv[3:]])
