"""Trainers that die and are replaced while controller, relay and replicas go on: a whole emulated run."""

import contextlib
import queue
from pathlib import Path

from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.publication import WeightId
from laminar_hpc.line.messages.training import Restored
from laminar_hpc.report import rundata
from laminar_hpc.simulator.emulation import stage
from laminar_hpc.store.checkpoints import newest_trainer_generation


class Died(Exception):
    """The trainer, as the test had it."""


class FewIds(queue.SimpleQueue):
    """Hands on what is published up to `last`, with which its trainer dies."""

    def __init__(self, handed: queue.SimpleQueue, last: int) -> None:
        self._handed, self._last = handed, last

    def put(self, given: WeightId) -> None:
        if given.step == self._last:
            raise Died
        self._handed.put(given)


def test_the_next_trainers_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    """The first ones die with the weights of step 3 and the batch of step 2 in hand; the next ones begin at
    step 1. What steps 1 and 2 were trained on is trained again, all trajectories end once, weight ids rise,
    and the zombie is told to leave."""
    zombies = []

    def trainers(config: RunConfig, seconds: float, handed: queue.SimpleQueue) -> None:
        with contextlib.suppress(Died):
            stage.trainer(config, seconds, FewIds(handed, 3))
        zombies.append(newest_trainer_generation(Path(config.run_dir)))
        channel = stage.join(config, "trainer")
        channel.send(Restored(1, ["checkpoint step_000002 is damaged"]))
        zombies.append(channel.welcome.trainer_generation)
        stage.train(config, channel, 1, seconds, handed)

    config = small_config(tmp_path, steps=4)
    stand = Stand(config, trainer=trainers)
    stand.run(90)
    assert zombies == [1, 2] and newest_trainer_generation(Path(config.run_dir)) == 2
    assert_every_one_ended_once(config)
    run = rundata.load(Path(config.run_dir))
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4] and run.abandoned_steps == 1
    size = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    assert len(run.consumed) == 4 * size and {t.consumed_step for t in run.consumed} == {0, 1, 2, 3}
    published = [(r["weight_id"], r["step"]) for r in run.records["publish"]]
    assert published == [(0, 0), (1, 1), (2, 2), (4, 1), (5, 2), (6, 3), (7, 4)]
    said = "\n".join(stand.lines)
    assert "going on from the checkpoint of step 1" in said and "step_000002 is damaged" in said
