"""A trainer whose checkpoints a test looks at."""

from pathlib import Path

from helpers.trainer import tiny
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.checkpointing.hf_files import HfFiles
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner


class Trainer:
    """A policy with what belongs to it, as trainer/loop.py has them."""

    def __init__(
        self, model: Path, run_dir: Path, welcome: Welcome | None = None, **settings: object
    ) -> None:
        self.config = tiny.make_config(
            model,
            **{
                "algorithm__minibatches_per_step": 2,
                "optimizer__lr": 1e-3,
                "optimizer__weight_decay": 0.1,
                "checkpoint__state_hash": True,
                **settings,
            },
        )
        self.policy = MegatronPolicy(self.config)
        self.learner = Learner(self.config, self.policy)
        self.checkpointer = Checkpointer(run_dir, self.policy, self.learner, welcome)

    def train(self, first: int, last: int) -> list[dict[str, float]]:
        return [
            self.learner.train(tiny.step_batch(tiny.make_batch(seed=100 + step)), step, lambda: None)
            for step in range(first, last)
        ]


def save_hf(policy: MegatronPolicy, folder: Path) -> None:
    """hf/ of a checkpoint alone, by one rank."""
    folder.mkdir()
    files = HfFiles(policy, 20.0)
    files.write(folder, files.collect(None), lambda: None)
