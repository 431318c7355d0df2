"""docs/promises.md#outlives-its-controller: a real controller dies by kill -9 in every window of a
trajectory's and a step's life; its workers go on and join the next one, and nothing is done twice."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from helpers.control.workers import Relay, Rollout, Trainer, Workers
from helpers.emulated.launch import prepare
from helpers.paths import HELPERS
from helpers.runs import assert_clean
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.line.messages.membership import Failure
from laminar_hpc.line.messages.moves import MoveCommit
from laminar_hpc.line.messages.rollouts import ScoreOrder
from laminar_hpc.line.messages.training import (
    Batch,
    Checkpointed,
    Continue,
    Leave,
    Restored,
    StepDone,
    TakeBatch,
    TrainerDone,
)
from laminar_hpc.line.stop import left_request, request_stop
from laminar_hpc.line.waiting import who_waits
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.files.folders import slots_root
from laminar_hpc.machine.locks.lock_owner import Owner
from laminar_hpc.machine.locks.run_lock import LOCK_FILE
from laminar_hpc.policies.metrics import batch_metrics
from laminar_hpc.rollout.partial_response import tokens_of


def trajectories_of(batch: Batch) -> list[Trajectory]:
    return [t for group in batch.groups for t in group.trajectories]


def configuration(folder: Path) -> RunConfig:
    config = prepare(folder, prompts=16, prompt_tokens=4, max_response_tokens=64)
    config.steps, config.resume, config.rollout.replicas = 3, "auto", 2
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 4, 2
    config.pipeline.max_staleness = 2
    config.cluster.stop_timeout_seconds, config.cluster.heartbeat_timeout_seconds = 10.0, 4.0
    return config


class Lives:
    """Controllers over one run directory, each begun as soon as the one before has died."""

    def __init__(self, folder: Path, *moments: str) -> None:
        self.config = configuration(folder)
        self.run_dir = Path(self.config.run_dir)
        self.run_dir.mkdir()
        (self.run_dir / "config.yaml").write_text(dump_config(self.config))
        self.out = folder / "out"
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HELPERS / "control/mortal.py"), str(self.run_dir)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.begin(*moments)

    def begin(self, *moments: str) -> None:
        """They follow on those that were given before."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{moment}\n" for moment in moments))
        self.process.stdin.flush()

    def kill(self) -> None:
        """The one that lives."""
        os.kill(int(re.findall(r"begun (\d+)", self.out.read_text())[-1]), 9)

    @property
    def deaths(self) -> int:
        return self.out.read_text().count("ended -9")

    def ends(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        return self.out.read_text()

    def groups_ready_by(self, *rollouts: Rollout) -> bool:
        """Whether a batch is there; else they do what they have."""
        for each in rollouts:
            each.ends()
            each.scores()
        ready = self.select("id FROM groups WHERE state = 'finished'")
        return len(ready) >= self.config.algorithm.prompts_per_step

    def select(self, what: str) -> list[tuple]:
        database = sqlite3.connect(f"file:{self.run_dir / 'store.sqlite'}?mode=ro", uri=True)
        try:
            return database.execute(f"SELECT {what}").fetchall()
        finally:
            database.close()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path)
    yield lives
    if lives.process.poll() is None:
        lives.process.kill()
        lives.process.wait()


@pytest.mark.slow
def test_a_controller_dies_in_every_window(lives: Lives) -> None:
    """Grant, Generated, Scored, Batch, StepDone, a move, TrainerDone: before or after the commit, and before
    anybody was answered. Each trajectory is consumed once or waits, each step is done once, weight ids rise,
    and no worker ends."""
    lives.begin("after Grant", "before Generated", "after Generated", "after Scored")
    trainer, relay = Trainer(lives.run_dir, "trainer", 0), Relay(lives.run_dir, "relay", 0)
    one, two = Rollout(lives.run_dir, 0), Rollout(lives.run_dir, 1)
    workers = Workers(trainer, relay, one, two)
    trainer.channel.send(Restored(None))
    relay.takes(trainer.publishes(0))
    workers.until(lambda: one.generating and two.generating, "a grant after the death that lost it")
    assert lives.deaths == 1 and not one.dropped + two.dropped
    first = {i: sample.attempt for each in (one, two) for i, (_, sample, _) in each.generating.items()}
    assert 1 in first.values(), "what was granted and not sent is granted again"

    one.ends(1)
    workers.until(lambda: lives.deaths == 3 and one.is_back(), "deaths before and after the commit")
    assert not one.all(ScoreOrder) + two.all(ScoreOrder), "its own replica scores it"
    one.scores()
    lives.begin("")
    workers.until(lambda: lives.deaths == 4 and two.is_back(), "the death with the score")
    workers.until(lambda: lives.groups_ready_by(one, two), "the groups of step 0")
    assert sorted(i for (i,) in lives.select("id FROM trajectories WHERE attempt > 1")) == []
    assert not one.dropped + two.dropped

    lives.kill()
    lives.begin("after Batch", "before StepDone", "after Continue", "")
    batch = trainer.takes(0)
    again = trainer.takes(0)
    assert again == batch
    relay.takes(trainer.publishes(1))
    trainer.channel.send(Checkpointed(1, "somewhere", 0.1, "0"))
    metrics = batch_metrics(trajectories_of(batch), 0, 0) | {"wait_seconds": 0.1, "train_seconds": 0.1}
    answer = trainer.has_done(StepDone(0, metrics))
    assert isinstance(answer, Continue)
    assert lives.deaths == 8
    workers.until(lambda: relay.is_back() and one.is_back() and two.is_back(), "everybody's return")

    ids = [i for (i,) in lives.select("id FROM weights ORDER BY id")]
    epochs = [e for (e,) in lives.select("restore_epoch FROM weights ORDER BY id")]
    assert len(ids) >= 2 and epochs == sorted(epochs)
    trained = lives.select("id FROM trajectories WHERE consumed_step = 0")
    assert sorted(i for (i,) in trained) == sorted(t.trajectory_id for t in trajectories_of(batch))
    for worker in workers.workers:
        worker.channel.close()


def test_a_controller_that_has_lost_its_lock_says_nothing_more(lives: Lives) -> None:
    """Promise (docs/promises.md#one-controller): it ends without a word in the run's records and to the
    workers, and leaves address and slots to its successor, whom all join."""
    lives.begin("", "")
    trainer, relay = Trainer(lives.run_dir, "trainer", 0), Relay(lives.run_dir, "relay", 0)
    slots = slots_root("/dev/shm", relay.channel.welcome.slots)
    slots.mkdir(exist_ok=True)
    one, two = Rollout(lives.run_dir, 0), Rollout(lives.run_dir, 1)
    workers = Workers(trainer, relay, one, two)
    trainer.channel.send(Restored(None))
    relay.takes(trainer.publishes(0))
    workers.until(lambda: one.generating and two.generating, "grants")
    owner = Owner("far", "ann", "n7", 4711, "1", "boot pid:[1]", 0.0, stale_after=0.5)
    (lives.run_dir / "successor").write_bytes(msgspec.json.encode(owner))
    os.utime(lives.run_dir / "successor", (1, 1))  # not fresh: the next one watches it for half a second
    (lives.run_dir / "successor").replace(lives.run_dir / LOCK_FILE)
    workers.until(lambda: "ended 1" in lives.out.read_text(), "the end of the one that was replaced")
    assert "end" not in [record["kind"] for record in jsonl.read(lives.run_dir / "metrics.jsonl")]
    assert (lives.run_dir / ADDRESS_FILE).exists() and slots.exists()
    workers.until(lambda: all(each.is_back() for each in (relay, one, two)), "the successor")
    assert not any(each.has_left for each in (relay, one, two)) and not one.dropped + two.dropped
    lives.kill()
    shutil.rmtree(slots, ignore_errors=True)
    for worker in workers.workers:
        worker.channel.close()


@pytest.mark.slow
def test_a_controller_whose_loop_blocks_is_replaced(lives: Lives) -> None:
    """Promise (docs/promises.md#standstill): it ends by itself, though its other threads go on; what it
    had not committed nobody was told of, and the next one, which it no longer keeps out, hears it again."""
    lives.begin("stuck Generated", "")
    trainer, relay = Trainer(lives.run_dir, "trainer", 0), Relay(lives.run_dir, "relay", 0)
    workers = Workers(trainer, relay, one := Rollout(lives.run_dir, 0), two := Rollout(lives.run_dir, 1))
    trainer.channel.send(Restored(None))
    relay.takes(trainer.publishes(0))
    workers.until(lambda: one.generating and two.generating, "grants")
    one.ends(1)
    workers.until(lambda: "stuck" in lives.out.read_text(), "the turn that blocks")
    workers.until(lambda: "ended 1" in lives.out.read_text(), "its end")
    assert "the controller ends, and another one can take over" in lives.out.read_text()
    assert lives.select("id FROM trajectories WHERE state = 'generated'") == []
    workers.until(lambda: one.is_back() and two.is_back(), "the next one")
    workers.until(lambda: lives.groups_ready_by(one, two), "the groups of step 0")
    assert not one.dropped + two.dropped
    assert lives.select("id FROM trajectories WHERE attempt > 1") == []
    for worker in workers.workers:
        worker.channel.close()


@pytest.mark.slow
def test_a_request_to_stop_waits_for_the_next_controller(lives: Lives) -> None:
    """`laminar stop` while there is no controller: the roles that wait for one are asked by the next, and
    leave in order; one that comes to other trainers knows nothing of it."""
    lives.begin("")
    trainer, relay = Trainer(lives.run_dir, "trainer", 0), Relay(lives.run_dir, "relay", 0)
    workers = Workers(trainer, relay, one := Rollout(lives.run_dir, 0), two := Rollout(lives.run_dir, 1))
    trainer.channel.send(Restored(None))
    relay.takes(trainer.publishes(0))
    workers.until(lambda: one.generating and two.generating, "grants")
    lives.kill()
    workers.until(
        lambda: trainer.channel.detached and who_waits(lives.run_dir), "the sign of a role that waits"
    )
    assert not request_stop(lives.run_dir, "laminar stop", seconds=0.5)
    lives.begin("")
    answer = trainer.channel.request(TakeBatch(0), Leave, timeout=30, what="to leave")
    assert isinstance(answer, Leave) and answer.reason == "laminar stop"
    trainer.channel.send(TrainerDone(0))
    trainer.channel.flush()
    trainer.channel.close()
    workers.workers.remove(trainer)
    for each in (relay, one, two):
        workers.until(lambda each=each: each.has_left, "Stop")
    assert "ended 0" in lives.ends() and not left_request(lives.run_dir, "")
    assert_clean(lives.run_dir)


def test_a_controller_dies_in_a_move_and_at_the_end(lives: Lives) -> None:
    """A move whose new owner is on record and was not told is committed, with all tokens; one that was not is
    off. What a replica has that came not back goes to others. The trainers' last word is not said twice, and
    the run ends in order."""
    lives.begin("after MoveCommit", "after TrainerDone", "")
    trainer, relay = Trainer(lives.run_dir, "trainer", 0), Relay(lives.run_dir, "relay", 0)
    slots = slots_root("/dev/shm", relay.channel.welcome.slots)
    slots.mkdir()  # as a relay that was killed leaves it
    one, two = Rollout(lives.run_dir, 0), Rollout(lives.run_dir, 1)
    workers = Workers(trainer, relay, one, two)
    trainer.channel.send(Restored(None))
    relay.takes(trainer.publishes(0))
    workers.until(lambda: one.generating and two.generating, "grants")
    lost = {i: sample.attempt for i, (_, sample, _) in one.generating.items()}
    one.works(5)
    two.drains()
    two.works(5)
    workers.workers.remove(one)
    one.channel.send(Failure("its engine died"))
    one.channel.close(goodbye=False)
    workers.until(lambda: lives.deaths == 1 and two.all(MoveCommit), "the commit of a move")
    committed = {int(m.move_id.split("-")[0]): m.attempt for m in two.all(MoveCommit)}
    assert all(
        committed[i] == lost[i] + 1 and tokens_of(two.partials[i]).tolist() == [7] * 5 for i in committed
    )

    three = Rollout(lives.run_dir, 0, life="b")
    workers.workers.append(three)
    for step in range(lives.config.steps):
        workers.until(lambda: lives.groups_ready_by(two, three), f"the groups of step {step}")
        batch = trainer.takes(step)
        relay.takes(trainer.publishes(step + 1))
        metrics = batch_metrics(trajectories_of(batch), 0, step) | {"wait_seconds": 0.1, "train_seconds": 0.1}
        trainer.has_done(StepDone(step, metrics))
    trainer.channel.send(TrainerDone(lives.config.steps))
    trainer.channel.flush()
    trainer.channel.close()
    workers.workers.remove(trainer)
    for each in (relay, two, three):
        workers.until(lambda each=each: each.has_left, "Stop")
    assert lives.deaths == 2 and "ended 0" in lives.ends()
    attempts = dict(lives.select("id, attempt FROM trajectories"))
    assert all(attempts[i] > attempt for i, attempt in lost.items())
    assert all(attempts[i] == attempt for i, attempt in committed.items())
    assert not slots.exists()
    assert_clean(lives.run_dir)
