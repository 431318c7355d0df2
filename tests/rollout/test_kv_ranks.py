"""Moves between engines of several tensor-parallel ranks: each rank's rows go to the same rank, and whatever
fails on one of them, pages and prefix caches stay the same on all (ranks_stand.py compares every turn)."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from laminar_hpc.engine.sglang.plugin.platform import activate

activate()  # before SGLang is imported, as its own processes do

from helpers.engines.ranks_stand import SIZE, Engine  # noqa: E402
from laminar_hpc.engine.kv.errors import KvRefused  # noqa: E402
from laminar_hpc.engine.sglang.plugin import kv_cache, kv_source, lockstep, protocol  # noqa: E402

PROMPT = list(range(1000, 1070))
Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines, on weight id 0."""
    monkeypatch.setattr(kv_cache, "served_weight_ids", lambda scheduler: [0])
    monkeypatch.setattr(kv_cache, "tensor_parallel", lambda: (0, 1))
    made: list[Engine] = []

    def one(ranks: int, page_size: int = 1, hasty: bool = False) -> Engine:
        made.append(Engine(tmp_path / str(len(made)), ranks, page_size, len(made), hasty))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def reserve(engine: Engine, tokens: int = 120, seconds: float = 20.0) -> protocol.KvReserve:
    return protocol.KvReserve("m", 0, tokens, "127.0.0.1", str(engine.folder), seconds)


def send(engine: Engine, address: str, seconds: float = 20.0) -> protocol.KvSend:
    return protocol.KvSend("m", "r", address, str(engine.folder), seconds)


def moved(source: Engine, destination: Engine) -> tuple[list[int], int]:
    """A request, moved; returns its tokens and of how many the KV is at the destination."""
    requests = source.begin("r", PROMPT, 60)
    source.turn()
    reserved = destination.call(reserve(destination), source)
    assert isinstance(reserved, protocol.KvReserved), reserved
    sent = source.call(send(source, reserved.address), destination)
    assert isinstance(sent, protocol.KvDone), sent
    detached = source.call(protocol.KvDetach("m", "r"), destination)
    assert isinstance(detached, protocol.KvDone), detached
    tokens = requests[0].tokens
    assert all(request.finished_reason.to_json() == {"type": "moved"} for request in requests)
    taken = destination.call(protocol.KvImport("m", tokens), source)
    assert isinstance(taken, protocol.KvDone) and taken.tokens == detached.tokens
    return tokens, taken.tokens


def assert_nothing_is_held(*engines: Engine) -> None:
    for engine in engines:
        engine.settle()
        assert all(rank.all_free() and not rank.port.kv.under_way for rank in engine.ranks)


@pytest.mark.parametrize(("ranks", "page_size"), [(1, 1), (2, 1), (3, 16)])
def test_every_rank_moves_its_own_rows(make: Make, ranks: int, page_size: int) -> None:
    """Promise: the KV of each rank is at the same rank of the destination, bit by bit, in whole pages but for
    the newest token's, and is a prefix in its cache; all is given back in the end."""
    source, destination = make(ranks, page_size), make(ranks, page_size)
    tokens, there = moved(source, destination)
    assert there == (len(tokens) - 1) // page_size * page_size
    for ours, theirs in zip(source.ranks, destination.ranks, strict=True):
        assert not theirs.all_free(), "a move holds its prefix until it is ended"
        assert torch.equal(ours.prefix(tokens[:there]), theirs.prefix(tokens[:there]))
    for engine in (source, destination):
        assert engine.call(protocol.KvEnd("m")) == protocol.KvDone(0, stalled=pytest.approx(0, abs=5))
    assert_nothing_is_held(source, destination)


def fails(rank: int, engine: Engine, part: str) -> Callable[[], None]:
    """Makes one rank's part fail; returns what mends it."""
    owner = getattr(engine.ranks[rank].port, "destination" if part == "_listen" else "source")

    def broken(*_: object) -> None:
        raise KvRefused(f"{part} of this rank fails")

    setattr(owner, part, broken)
    return lambda: delattr(owner, part)


def test_a_rank_that_fails_ends_the_move_on_all(make: Make) -> None:
    """Promise: the answer names the rank, no rank keeps a page, and the next move works; in each step."""
    source, destination = make(2), make(2)
    mend = fails(1, destination, "_listen")
    assert destination.call(reserve(destination)) == protocol.OperationRefused(
        "_listen of this rank fails (tensor-parallel rank 1)"
    )
    assert_nothing_is_held(destination)
    mend()
    requests = source.begin("r", PROMPT, 200)
    source.turn()
    for step in ("send", "detach"):
        reserved = destination.call(reserve(destination, 300), source)
        if step == "detach":
            assert isinstance(source.call(send(source, reserved.address), destination), protocol.KvDone)
        mend = fails(1, source, "_send")
        asked = send(source, reserved.address) if step == "send" else protocol.KvDetach("m", "r")
        said = source.call(asked, destination)
        assert said == protocol.OperationRefused("_send of this rank fails (tensor-parallel rank 1)")
        assert not source.ranks[0].port.kv.under_way
        refused = destination.call(protocol.KvImport("m", requests[0].tokens), source)
        rank = 0 if step == "send" else 1  # the other has all
        assert "is not all here" in refused.text and refused.text.endswith(f"(tensor-parallel rank {rank})")
        destination.call(protocol.KvEnd("m"), source)
        mend()
    assert_nothing_is_held(source, destination)
    moved(source, destination)


def test_kv_of_one_rank_is_missing(make: Make) -> None:
    """Promise: what came to one rank only is imported by none."""
    source, destination = make(2), make(2)
    source.begin("r", PROMPT, 100)
    source.turn()
    reserved = destination.call(reserve(destination, 200), source)
    inboxes = json.loads(reserved.address)
    for wrong, says in (
        (inboxes[:1], "the destination has 1 tensor-parallel ranks, this engine 2"),
        (inboxes[::-1], r"it is of model rank \d of 2, this engine serves rank"),
    ):
        refused = source.call(send(source, json.dumps(wrong)), destination)
        assert isinstance(refused, protocol.OperationRefused)
        assert re.search(says, refused.text)
    destination.call(protocol.KvEnd("m"), source)
    assert_nothing_is_held(source, destination)


def test_a_program_error_on_one_rank(make: Make) -> None:
    """Promise: the move is ended on the others too, and its pages are given back everywhere."""
    source, destination = make(2), make(2)
    source.begin("r", PROMPT, 60)
    source.turn()
    reserved = destination.call(reserve(destination, seconds=5.0), source)
    hold = source.ranks[1].port.kv.cache.slots

    def broken(*_: object) -> None:
        raise ValueError("a program error")

    source.ranks[1].port.kv.cache.slots = broken
    source.ask(send(source, reserved.address, seconds=1.0))
    # the ranks differ until rank 0 has heard of it
    for _ in range(200):
        orders = source.ranks[0].port.orders()
        for rank in source.ranks:
            rank.port.turn([orders] if orders else [])
        if (said := source.answer()) is not None:
            break
        source.ranks[0].port.leader.socket.poll(20)
    assert said == protocol.OperationRefused("KvSend: ValueError: a program error (tensor-parallel rank 1)")
    source.ranks[1].port.kv.cache.slots = hold
    destination.call(protocol.KvEnd("m"), source)
    assert_nothing_is_held(source, destination)


def test_a_rank_that_does_not_end_its_part(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the wait for it is bounded, and the answer says for whom."""
    monkeypatch.setattr(lockstep, "PART_SECONDS", 0.2)
    source, destination = make(2), make(2)
    source.begin("r", PROMPT, 60)
    source.turn()
    reserved = destination.call(reserve(destination, seconds=0.5), source)
    left = json.loads(reserved.address)
    left[1]["port"] = 1  # nobody listens there
    said = source.call(send(source, json.dumps(left), seconds=0.5), destination)
    assert said == protocol.OperationRefused("KvSend: tensor-parallel rank 1 took more than 0.2 s")
    assert_nothing_is_held(source)


def test_a_request_that_takes_no_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a detach is called off on all ranks in one turn, and the request goes on; a move that nobody
    ends runs out of time."""
    monkeypatch.setattr(kv_source, "DETACH_SECONDS", 0.0)
    source, destination = make(2), make(2)
    requests = source.begin("r", PROMPT, 60)
    source.turn()
    reserved = destination.call(reserve(destination), source)
    assert isinstance(source.call(send(source, reserved.address), destination), protocol.KvDone)
    batches = [rank.batch.reqs for rank in source.ranks]
    for rank in source.ranks:
        rank.step = lambda token: None
    said = source.call(protocol.KvDetach("m", "r"))
    assert said == protocol.OperationRefused("KV detach refused: request r took no step for 0 s")
    assert all(batches) and not any(request.to_finish for request in requests)
    for rank in source.ranks:
        del rank.step
    destination.ranks[0].port.kv.under_way["m"].expires = 0.0
    assert_nothing_is_held(source, destination)


def history(make: Make, seed: int) -> None:
    """Moves of which anything may fail on any rank, and which are ended, run out or flushed at any time."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 4])
    source, destination = make(3, page_size, hasty=True), make(3, page_size, hasty=True)
    for number in range(3):
        requests = source.begin("r", [number, *PROMPT], draw.randrange(20, 120))
        source.turn()
        mends = [
            fails(draw.randrange(3), *draw.choice([(destination, "_listen"), (source, "_send")]))
            for _ in range(draw.choice([0, 0, 1]))
        ]
        address, over = "", False
        for step in ("reserve", "send", "detach", "import"):
            asked = {
                "reserve": lambda: reserve(destination, draw.choice([100, 200, SIZE + 1])),
                "send": lambda a=address: send(source, a),
                "detach": lambda: protocol.KvDetach("m", "r"),
                "import": lambda r=requests: protocol.KvImport("m", r[0].tokens),
            }[step]()
            engine = destination if step in ("reserve", "import") else source
            if draw.random() < 0.15:  # ended while it is under way
                engine.ask(protocol.KvEnd("m"))
                over = True
            reply = engine.call(asked, source if engine is destination else destination)
            if isinstance(reply, protocol.KvReserved):
                address = reply.address
            if over or isinstance(reply, protocol.OperationRefused):
                break
        for mend in mends:
            mend()
        if draw.random() < 0.2:  # new weights
            for rank in destination.ranks:
                rank.port.kv.drop_all()
                rank.tree.reset()
                rank.allocator.clear()
        for engine in (source, destination):
            engine.settle()
            while engine.answer() is not None:
                pass
            engine.call(protocol.KvEnd("m"))
    assert_nothing_is_held(source, destination)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 150), marks=pytest.mark.slow)])
def test_ranks_agree_in_any_history(make: Make, seeds: range) -> None:
    """Promise: whatever fails, is called off or ends at whatever time, on whichever rank, all ranks have the
    same pages and prefixes in every turn, and none is lost."""
    for seed in seeds:
        history(make, seed)
