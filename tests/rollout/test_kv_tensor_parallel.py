"""Requests moved between two real engines of two tensor-parallel ranks each, over either transport, and what
becomes of a move when one rank cannot do its part. ranks_stand.py has the same without SGLang's server."""

import asyncio
import json
from collections.abc import Iterator

import psutil
import pytest

from helpers.engines.moving import decoding, detached, greedy, in_its_middle, prompt_of, same_answers
from helpers.engines.pair import Pair, start_pair
from helpers.engines.prompts import before_its_end
from laminar_hpc.engine.interface import EngineDied, Generation
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang import move_calls

CAPACITY = 16384
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[2, 1], ids=["gqa", "mqa"])
def split_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One KV head for each rank, and one that both have."""
    pair = start_pair(tmp_path_factory.mktemp("split"), tensor_parallel=2, kv_heads=request.param)
    yield pair
    pair.stop()


async def assert_all_room_is_there(pair: Pair) -> None:
    """Each rank of each engine can give all of its pool."""
    for engine in pair.engines:
        await engine.kv_reserve("all", 0, CAPACITY)
        await engine.kv_abort("all")


# The tests are one history of one pair, in this order.


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_moved_answers_are_the_answers(split_pair: Pair, way: str) -> None:
    """Promise: greedy continuation and log-probs are equal, the whole prefix is a hit, six at once."""
    split_pair.loop.run(same_answers(split_pair, range(6) if way == "shm" else range(10, 16), 300, way))
    split_pair.loop.run(assert_all_room_is_there(split_pair))


def test_one_rank_cannot_send(split_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: where one rank does not reach its counterpart, before the detach or after it, the move fails
    with that rank's line, the request loses nothing, and no rank keeps a page."""
    monkeypatch.setattr(move_calls, "MOVE_SECONDS", 1.0)
    ours, theirs = split_pair.engines
    parameters = greedy(split_pair, 1500)

    async def run() -> None:
        whole = await ours.generate(prompt_of(30), parameters, "whole", "0")

        async def tried(rest: str) -> Generation:
            call, half = (
                asyncio.create_task(ours.generate(prompt_of(30), parameters, rest, "0")),
                f"half-{rest}",
            )
            inboxes = json.loads(await theirs.kv_reserve(half, 0, 1600))
            broken = json.dumps([inboxes[0], inboxes[1] | {"port": 1}])
            with pytest.raises(KvRefused, match=r"said nothing for 1 s \(tensor-parallel rank 1\)"):
                await decoding(ours, rest, half, broken, call)
            await theirs.kv_abort(half)
            address = await theirs.kv_reserve(rest, 0, 1600)
            await decoding(ours, rest, rest, address, call)
            await theirs.kv_abort(rest)  # nobody takes the second part
            with pytest.raises(KvRefused, match=r"\(tensor-parallel rank 0\)"):
                await detached(ours, rest, rest)
            return await call

        first = await in_its_middle(split_pair.engines, "rest", tried)
        assert first.finish_reason == "moved"
        left = parameters | {"max_new_tokens": 1500 - len(first.tokens)}
        second = await theirs.generate([*prompt_of(30), *first.tokens.tolist()], left, "again", "0")
        assert [*first.tokens, *second.tokens] == whole.tokens.tolist()
        await assert_all_room_is_there(split_pair)

    split_pair.loop.run(run())


def test_the_logs_tell_of_no_leak(split_pair: Pair) -> None:
    """Promise: SGLang's own accounts of each rank's pool balanced all the time."""

    async def idle() -> None:
        await asyncio.sleep(1.2)  # an idle turn, in which SGLang counts

    split_pair.loop.run(idle())
    for engine in split_pair.engines:
        said = engine.log.read_text()
        assert "leak" not in said and "Traceback" not in said


def test_a_rank_of_the_destination_dies(split_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the source's request goes on as if nothing had been tried, and keeps nothing for the move."""
    monkeypatch.setattr(move_calls, "MOVE_SECONDS", 1.0)
    ours, theirs = split_pair.engines
    parameters = greedy(split_pair, 1500)

    async def run() -> None:
        whole = await ours.generate(prompt_of(31), parameters, "whole-31", "0")
        address = await theirs.kv_reserve("dead", 0, 1600)
        members = psutil.Process(theirs.process.pid).children(recursive=True)
        next(p for p in members if p.cmdline()[0] == "sglang::scheduler_TP1").kill()

        async def stays(number: int) -> Generation:
            name = f"stays-{number}"
            call = asyncio.create_task(ours.generate(prompt_of(31), parameters, name, "0"))
            with pytest.raises(KvRefused, match=r"nothing for 1 s \(tensor-parallel rank 1\)|died"):
                await decoding(ours, name, name, address, call)
            return await call

        assert (await before_its_end(stays)).tokens.tolist() == whole.tokens.tolist()
        with pytest.raises(EngineDied):
            await theirs.kv_abort("dead")
        await ours.kv_reserve("all", 0, CAPACITY)
        await ours.kv_abort("all")

    split_pair.loop.run(run())
