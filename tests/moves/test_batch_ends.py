"""A local batch that is broken off leaves no task behind: neither one of a move that is under way, nor of one
that comes while the replica leaves."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from helpers.emulated.stand import small_config
from helpers.engines.replica_side import ReplicaSide
from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.engine.factory import engine_factory
from laminar_hpc.engine.interface import EngineDied, Generation, SamplingParameters
from laminar_hpc.line.messages.data import Partial, PromptGroup, Sample, VersionSpan
from laminar_hpc.line.messages.moves import (
    Import,
    Imported,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)
from laminar_hpc.line.messages.rollouts import Grant, Increment, Lost
from laminar_hpc.rollout.siblings import TAKEN_TOKENS, as_tokens, taken_along

GROUP = PromptGroup(1, [1, 2, 3], "", {}, [Sample(7, 0)])
TWO = PromptGroup(1, [1, 2, 3], "", {}, [Sample(7, 0), Sample(9, 0)])


class OneBatch(ReplicaSide):
    """On an emulated engine that goes on and on."""

    def __init__(self, folder: Path) -> None:
        config = small_config(folder)
        emulation = config.emulation
        emulation.median_response_tokens, emulation.time_scale = 1000.0, 0.5
        super().__init__(config, folder, engine_factory(config, 0, folder))

    async def granted(self, folder: Path, group: PromptGroup, length: int) -> asyncio.Task[None]:
        """Nothing of it has begun yet."""
        await self.engines.start(folder, 0)
        return self.grant(Grant(1, 0, 0, [group], 1.0, length))

    async def begin(self, folder: Path) -> asyncio.Task[None]:
        running = await self.granted(folder, GROUP, 1000)
        while not self.batch.generating:
            await asyncio.sleep(0)
        return running

    def reserve(self, move_id: str) -> None:
        self.migration.arrived(Reserve(move_id, 8, GROUP, 0, 0, 100, False, 1.0, 1000))


async def test_no_move_comes_to_a_batch_that_was_broken_off(tmp_path: Path) -> None:
    """Its reservation is refused, though the last requests have not ended as requests do."""
    here = OneBatch(tmp_path)
    running = await here.begin(tmp_path)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    here.reserve("late")
    assert here.said == [MoveFailed("late", "no local batch is being generated here")]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await here.engines.current.stop()


async def test_what_is_granted_is_here_at_once(tmp_path: Path) -> None:
    """Also before its first request: what the controller drops then is not generated."""
    here = OneBatch(tmp_path)
    running = await here.granted(tmp_path, TWO, 4)
    assert sorted(here.batch.trajectories) == [7, 9]
    here.batch.drop(lambda work: work.trajectory_id == 7)
    await running
    assert list(here.ended) == [9] and here.batch.moved_away == 1 and not here.batch.trajectories
    await here.engines.current.stop()


async def test_an_engine_that_dies_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first of its requests, before the others are made: all are handed over."""
    here = OneBatch(tmp_path)

    async def dies(*_: object) -> None:
        raise EngineDied("it died")

    running = await here.granted(tmp_path, TWO, 4)
    monkeypatch.setattr(here.engines.current, "generate", dies)
    with pytest.raises(EngineDied):
        await running
    assert sorted(work.trajectory_id for work in here.batch.left) == [7, 9] and not here.batch.trajectories
    await here.engines.current.stop()


class Late:
    """An engine that a request reaches only after the first abort."""

    def __init__(self) -> None:
        self._aborted, self.ends = asyncio.Event(), list[asyncio.Future[Generation]]()

    async def generate(self, *_: object) -> Generation:
        await self._aborted.wait()
        self.ends.append(asyncio.get_running_loop().create_future())
        return await self.ends[-1]

    async def abort(self, request_id: str | None = None) -> None:
        for end in self.ends:
            if not end.done():
                tokens, logprobs = np.array([5], np.int32), np.array([-1.0], np.float32)
                end.set_result(Generation(tokens, logprobs, "abort", [VersionSpan(0, 0, 1)]))
        self._aborted.set()


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_request_on_its_way_to_the_engine_is_stopped_too(tmp_path: Path, for_good: bool) -> None:
    """The engine knows nothing of it yet when all are aborted: nobody waits for its last token."""
    here, engine = OneBatch(tmp_path), Late()
    running = await here.granted(tmp_path, TWO, 1000)
    await here.engines.current.stop()
    here.engines.current = engine
    while not here.batch.generating:
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await (here.batch.break_off(60) if for_good else here.batch.pause())
    assert len(engine.ends) == 2 and not here.ended
    assert [work.partial.count for work in here.batch.trajectories.values()] == [1, 1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Streams(Late):
    """An engine that tells of the first two tokens of each request, and has drawn a third when it is told to
    abort."""

    async def generate(self, *given: object) -> Generation:
        on_tokens = given[-1]
        assert callable(on_tokens)
        on_tokens(np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32))
        self.ends.append(asyncio.get_running_loop().create_future())
        return await self.ends[-1]

    async def abort(self, request_id: str | None = None) -> None:
        tokens, logprobs = np.array([5, 6, 7], np.int32), np.array([-1.0, -2.0, -3.0], np.float32)
        for end in self.ends:
            if not end.done():
                end.set_result(Generation(tokens, logprobs, "abort", [VersionSpan(0, 0, 3)]))


async def test_the_pool_goes_on_behind_an_interruption(tmp_path: Path) -> None:
    """What was drawn between the last increment and the interruption is told with the next request: else
    nothing more of the response would follow on what the pool has. Also to another controller."""
    here, engine, pool = OneBatch(tmp_path), Streams(), PartialResponsePool()
    here.batch.config.rollout.increment_tokens, here.batch.one_policy = 2, False
    running = await here.granted(tmp_path, GROUP, 1000)
    await here.engines.current.stop()
    here.engines.current = engine
    for requests in (1, 2, 3):
        while len(engine.ends) < requests and not running.done():
            await asyncio.sleep(0)
        if requests == 3:  # what the second interruption has left was told to the next controller
            pool = PartialResponsePool()
        for said in here.said:
            assert isinstance(said, Increment)
            pool.add(said)
        here.said.clear()
        partial, known = here.batch.trajectories[7].so_far, pool.get(7, 0)
        assert partial.count == 3 * requests - 1 and known is not None
        told = known.tokens, known.logprobs, known.spans
        assert told == (partial.tokens, partial.logprobs, partial.spans)
        await here.batch.pause()
        if requests == 2:
            here.batch.tell_all()
        here.batch.resume()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_message_does_not_keep_a_move_alive(tmp_path: Path) -> None:
    """The controller's answer comes in the same turn of the loop in which the batch is broken off."""
    here = OneBatch(tmp_path)
    running = await here.begin(tmp_path)
    here.reserve("m")
    await here.until_said(Reserved)
    for _ in range(3):  # turns, until it waits for the answer
        await asyncio.sleep(0)
    here.migration.arrived(Import("m", Partial()))
    running.cancel()
    ended, _ = await asyncio.wait([running], timeout=5)
    assert ended, "the batch waits for the move"
    await here.engines.current.stop()


@pytest.mark.parametrize("turns", range(-4, 8))
async def test_what_comes_while_the_engine_dies_is_handed_over(tmp_path: Path, turns: int) -> None:
    """The commit of its move comes so many turns of the loop before the engine dies, or behind that: it goes
    on elsewhere with the batch's own trajectory, or the controller hears that it is lost."""
    here = OneBatch(tmp_path)
    running = await here.begin(tmp_path)
    here.reserve("m")
    await here.until_said(Reserved)
    here.migration.arrived(Import("m", Partial()))
    await here.until_said(Imported)
    both = [
        lambda: here.migration.arrived(MoveCommit("m", 1)),
        lambda: here.batch.fail(EngineDied("it died")),
    ]
    first, second = both if turns >= 0 else reversed(both)
    first()
    for _ in range(abs(turns)):
        await asyncio.sleep(0)
    second()
    with pytest.raises(EngineDied):
        await running
    left = sorted(work.trajectory_id for work in here.batch.left)
    assert left == [7, 8] or (left == [7] and Lost(8, 1, "its engine failed while it came here") in here.said)
    await here.engines.current.stop()


class Seeds(Late):
    """An engine that notes how each request is to be drawn, and draws one token until it is told to abort."""

    def __init__(self) -> None:
        super().__init__()
        self._aborted.set()
        self.asked: list[tuple[int, SamplingParameters]] = []

    async def generate(self, *given: object) -> Generation:
        sampling, request_id = given[1:3]
        self.asked.append((int(str(request_id).split("-")[-3]), sampling))
        return await super().generate()


async def test_each_trajectory_is_drawn_with_a_seed_of_its_own(tmp_path: Path) -> None:
    """With SGLang's enable-deterministic-inference equal seeds draw equal answers: the samples of one prompt
    have different ones. Each keeps its own when it is interrupted and at another replica; a branch, and a run
    with another seed, has another. They are what SGLang takes for seeds."""
    found = []
    for replica in range(3):
        here, engine = OneBatch(tmp_path / str(replica)), Seeds()
        here.batch.config.seed, here.batch.one_policy = 5 + replica // 2, False
        running = await here.granted(tmp_path, TWO, 1000)
        await here.engines.current.stop()
        here.engines.current = engine
        for requests in (2, 4):
            while len(engine.ends) < requests:
                await asyncio.sleep(0)
            await here.batch.pause()
            if requests == 2:
                here.batch.resume()
        seeds = [(trajectory, sampling["sampling_seed"]) for trajectory, sampling in engine.asked]
        assert sorted(seeds[:2]) == sorted(seeds[2:])
        found.append(dict(seeds))
        for _, sampling in engine.asked:
            SamplingParams(**sampling).verify(500)
        work = here.batch.trajectories[7]
        work.branch()
        assert work.sampling_seed(here.batch.config.seed) not in found[-1].values()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert found[0] == found[1] and len({*found[0].values(), *found[2].values()}) == 4


@pytest.mark.parametrize("speculation", ["suffix", "off"])
async def test_what_moves_takes_along_what_its_group_has_finished(tmp_path: Path, speculation: str) -> None:
    """Promise: the engine to which a trajectory comes may guess from the samples of its group that another
    engine has generated, where engines guess from texts of others."""
    source, engine = OneBatch(tmp_path / "source"), Seeds()
    source.batch.config.rollout.speculation = speculation
    running = [await source.granted(tmp_path, TWO, 1000)]
    await source.engines.current.stop()
    source.engines.current = engine
    while len(engine.ends) < 2:
        await asyncio.sleep(0)
    tokens, logprobs = np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32)
    engine.ends[0].set_result(Generation(tokens, logprobs, "stop", [VersionSpan(0, 0, 2)]))
    while not source.ended:
        await asyncio.sleep(0)
    source.migration.arrived(MoveOrder("m", engine.asked[1][0], 0, ""))
    await source.until_said(MoveReady)
    ready = source.said[-1]
    assert isinstance(ready, MoveReady)

    there, engine = OneBatch(tmp_path / "there"), Seeds()
    running.append(await there.granted(tmp_path, GROUP, 1000))
    await there.engines.current.stop()
    there.engines.current = engine
    while not engine.ends:
        await asyncio.sleep(0)
    there.reserve("m")
    await there.until_said(Reserved)
    there.migration.arrived(Import("m", ready.partial, ready.siblings))
    await there.until_said(Imported)
    there.migration.arrived(MoveCommit("m", 1))
    while len(engine.ends) < 2:
        await asyncio.sleep(0)
    told = [sampling.get("guess_from") for _, sampling in engine.asked]
    assert told == [None, [5, 6] if speculation == "suffix" else None]
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def test_the_newest_siblings_are_taken_along() -> None:
    """As many tokens as a move has room for, the newest last; each response ends where it ended."""
    short, long = np.arange(5, dtype="<i4").tobytes(), np.arange(TAKEN_TOKENS, dtype="<i4").tobytes()
    assert as_tokens(taken_along([])) == []
    assert as_tokens(taken_along([short, short])) == [0, 1, 2, 3, 4, -1, 0, 1, 2, 3, 4]
    assert as_tokens(taken_along([short, long])) == list(range(TAKEN_TOKENS))
    assert as_tokens(taken_along([long, short])) == [*range(TAKEN_TOKENS - 5), -1, *range(5)]
