"""A whole emulated run inside the test's process, so that a test can hurt any part of it: the real
controller, real workers with emulated engines in an event loop, the stage in threads; all of them meet over
real sockets."""

import asyncio
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, runtime_checkable
from unittest.mock import patch

from helpers.emulated.launch import prepare
from helpers.processes import LoopThread
from helpers.runs import assert_clean
from laminar_hpc.config.check import check
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller import run as controller_run
from laminar_hpc.controller.beginning import Begun
from laminar_hpc.controller.loop import Controller
from laminar_hpc.environments import preflight
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.line.hub import Hub
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.line.messages.membership import UNNUMBERED
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.machine.processes import machine_name
from laminar_hpc.simulator.emulated import responses
from laminar_hpc.simulator.emulation import stage
from laminar_hpc.simulator.emulation.fleet import EmulatedReplica, NewWorker, new_worker
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import stored_trajectories
from laminar_hpc.store.rundir import prepare as prepare_run_dir

PROMPT_TOKENS = 10


def small_config(
    folder: Path, replicas: int = 3, steps: int = 3, prompts: int = 16, samples: int = 4, **pipeline: object
) -> RunConfig:
    """Some seconds long: trajectories of some hundred tokens, 20 times as fast as real engines."""
    config = prepare(folder, prompts=64, prompt_tokens=PROMPT_TOKENS, max_response_tokens=1000)
    config.steps = steps
    config.rollout.replicas = replicas
    config.rollout.kv_cache_tokens = 100_000
    config.rollout.max_concurrent = 64
    config.rollout.increment_tokens = 0
    config.algorithm.prompts_per_step = prompts
    config.algorithm.samples_per_prompt = samples
    config.emulation.time_scale = 20.0
    config.emulation.wire_share = 1e-3
    config.emulation.median_response_tokens = 300.0
    config.emulation.sigma = 1.0
    config.cluster.heartbeat_timeout_seconds = 30.0
    config.cluster.stop_timeout_seconds = 20.0
    config.pipeline.max_staleness = None
    config.pipeline.repack_seconds = 0.1
    config.pipeline.repack_requests = 64
    for name, value in pipeline.items():
        setattr(config.pipeline, name, value)
    return config


def controller_of(
    config: RunConfig, begun: Begun, hub: Hub, relays: int, machine: str, say: Callable[[str], None]
) -> Controller:
    """As a run builds it, but that no process is started to try the reward on the first row."""
    with patch.object(preflight, "first_call", lambda *_: []):
        return controller_run.build(config, begun, hub, relays, machine, say)


@runtime_checkable
class Mortal(Protocol):
    """An engine that a test can end."""

    def die(self) -> None: ...


class Shuffler:
    """Begins moves of trajectories by chance, more than any plan would: from whoever has one to whoever
    generates on the same weights."""

    def __init__(self, seed: int, every: float = 0.05, at_once: int = 4) -> None:
        self.random, self.every, self.at_once = random.Random(seed), every, at_once
        self.begun, self._next = 0, 0.0

    def __call__(self, controller: Controller) -> None:
        now, migration, replicas = time.monotonic(), controller.migration, controller.replicas
        if now < self._next:
            return
        self._next = now + self.every
        holders = controller.tracker.groups.holders
        owned = {replica: holders.generating(replica) for replica in holders.generating_counts()}
        moving = set(migration.moving)
        for _ in range(self.at_once - len(moving)):
            source, destination = (self.random.choice(sorted(owned)) for _ in range(2)) if owned else (0, 0)
            weights = [replicas.at(replica).weight_id for replica in (source, destination)]
            free = [(i, s) for _, i, s in owned.get(source, []) if i not in moving]
            if source != destination and weights[0] == weights[1] is not None and free:
                trajectory_id, sample = self.random.choice(free)
                moving.add(trajectory_id)
                migration.begin(trajectory_id, sample.attempt, source, destination, weights[0], 500, now)
                self.begun += 1


class Stand:
    """One run. `each_turn` is called in the controller's thread after every turn, `new_worker` makes
    the replicas' workers, `trainer` is what trains."""

    def __init__(
        self,
        config: RunConfig,
        new_worker: NewWorker = new_worker,
        each_turn: Callable[[Controller], None] = lambda _: None,
        trainer: Callable[[RunConfig, float, queue.SimpleQueue], None] = stage.trainer,
        lasting: int | None = None,
    ) -> None:
        """`lasting`: replicas that are there from the start, each followed by another when it dies; default
        all that are configured. `join` adds others."""
        self._trainer, self._lasting = trainer, config.rollout.replicas if lasting is None else lasting
        self.living: list[Future] = []
        self.newcomers: list[EmulatedReplica] = []
        self.config, self._new_worker, self.each_turn = config, new_worker, each_turn
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self.loop = LoopThread()
        self.pool = RewardPool(config.reward)
        self.ending = False
        self.replicas: dict[int, EmulatedReplica] = {}
        self.lives = 0

    def run(self, seconds: float) -> None:
        """To the end, then audits its records. Fails when that takes longer, or when a part fails."""
        config, run_dir = self.config, Path(self.config.run_dir)
        derived, machine = check(config), machine_name(config.relay.shm_dir)
        start = prepare_run_dir(config)
        (run_dir / "config.yaml").write_text(dump_config(config))
        hub = Hub(run_dir, f"stand-{random.randrange(1 << 40):x}", config.cluster.host, 0, machine)
        lock = RunLock([run_dir], self.lines.append)
        begun = Begun(derived, start, lock, 0)
        try:
            controller = controller_of(config, begun, hub, 1, machine, self.lines.append)
        except BaseException:  # pytest would wait for the sockets for ever
            controller_run.close(None, hub, run_dir, replaced=False)
            lock.release()
            raise
        handed: queue.SimpleQueue = queue.SimpleQueue()
        threads = [
            threading.Thread(target=part, args=args, daemon=True)
            for part, args in ((stage.relay, (config, handed)), (self._trainer, (config, 1e-6, handed)))
        ]
        self.loop.run(self.pool.start())
        try:
            for thread in threads:
                thread.start()
            self.living += [self.loop.start(self._keep_alive(index)) for index in range(self._lasting)]
            deadline = time.monotonic() + seconds
            while not controller.state.finished:
                controller.turn()
                self.each_turn(controller)
                assert time.monotonic() < deadline, (
                    f"the run hangs: {controller.training.waits_for}; {self.lines[-3:]}"
                )
            self.ending = True
            controller.tell_all_to_leave("done")
            while controller.members.by_place and time.monotonic() < deadline + 20:
                controller.turn()
            assert not controller.members.by_place, "not all have left"
            for replica in self.living:
                replica.result(20)
        finally:
            self.ending = True
            self.controller = controller
            controller_run.close(controller, hub, run_dir, not lock.is_sure)
            lock.release()
            for thread in threads:
                thread.join(10)
            self.loop.run(self.pool.close())
            self.loop.close()
        assert_clean(run_dir)

    def join(self) -> EmulatedReplica:
        """One more replica, which the controller numbers. Nobody follows when it leaves or dies."""
        replica = EmulatedReplica(self.config, UNNUMBERED, self.pool, self._new_worker)
        self.newcomers.append(replica)
        self.living.append(self.loop.start(replica.run()))
        return replica

    async def _keep_alive(self, index: int) -> None:
        """A replica, and the next one in its place when it dies."""
        while not self.ending:
            self.replicas[index] = EmulatedReplica(self.config, index, self.pool, self._new_worker)
            self.lives += 1
            await self.replicas[index].run()
            await asyncio.sleep(0.05)

    def kill(self, index: int, known: set[int]) -> bool:
        """Ends the engine of a replica if it still generates one of the `known` trajectories."""

        async def kill() -> bool:
            worker = self.replicas[index].worker
            works = worker.batch.trajectories if worker is not None else {}
            if any(i in works and works[i].request_id is not None for i in known):
                self.engine(index).die()
                return True
            return False

        return bool(self.loop.run(kill()))

    def engine(self, index: int) -> Mortal:
        """The engine of a replica."""
        worker = self.replicas[index].worker
        assert worker is not None
        engine = worker.engines.current
        assert isinstance(engine, Mortal)
        return engine


def assert_is_whole(whole: Whole, config: RunConfig) -> None:
    """Its tokens and log-probs are those of its number, none lost, doubled or misplaced by moves, and its
    spans cover it: one, unless new weights come into running trajectories."""
    t, response = whole.record, whole.response
    e, n = config.emulation, len(response.tokens)
    group = t.trajectory_id // config.algorithm.samples_per_prompt
    most = config.sampling.max_response_tokens
    assert n == responses.response_length(t.trajectory_id, group, e.median_response_tokens, e.sigma, most)
    vocabulary = model_config(config.model.path)["vocab_size"]
    assert response.tokens.tolist() == responses.tokens(t.trajectory_id, 0, n, vocabulary).tolist()
    assert response.logprobs.tolist() == responses.logprobs(t.trajectory_id, 0, n).tolist()
    spans = response.spans
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])] and spans[-1].end == n
    ids = [s.weight_id for s in spans]
    assert (
        ids == [t.weight_id]
        if config.pipeline.refresh != "interrupt"
        else t.weight_id <= ids[0] and ids == sorted(set(ids))
    )


def assert_every_one_ended_once(config: RunConfig) -> dict[int, Trajectory]:
    """All that was ever granted is finished or consumed, in whole; returns the trajectories by id."""
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    rows = database.execute("SELECT id, state FROM trajectories").fetchall()
    stored = stored_trajectories(database, [i for i, _ in rows])
    database.close()
    assert {state for _, state in rows} <= {"consumed", "finished"}, "a trajectory was lost"
    wanted = config.steps * config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    assert len(rows) == len({i for i, _ in rows}) == wanted
    found = {whole.record.trajectory_id: whole for whole in wholes(Path(config.run_dir), stored)}
    assert found.keys() == {i for i, _ in rows}
    for whole in found.values():
        assert_is_whole(whole, config)
    return {i: whole.record for i, whole in found.items()}
