"""docs/promises.md#drains: a replica that is told to end leaves nothing behind."""

import time
from collections.abc import Callable

import pytest

from helpers.control.script import samples_of, scripted
from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.loop import Controller
from laminar_hpc.line import worker_line
from laminar_hpc.line.endings import Terminated
from laminar_hpc.line.messages.data import Partial, ReplicaLoad, VersionSpan
from laminar_hpc.line.messages.membership import Goodbye, Ping
from laminar_hpc.line.messages.moves import Reserve
from laminar_hpc.line.messages.rollouts import Leaving, Unfinished, WeightsOpened
from laminar_hpc.report import rundata, summary
from laminar_hpc.rollout import reporting, shutdown
from laminar_hpc.rollout.partial_response import columns, tokens_of
from laminar_hpc.rollout.worker import RolloutWorker

UNDER_WAY = 8


class Terminator:
    """After every turn of the controller: tells a replica to end as SIGTERM does, once it generates UNDER_WAY
    responses, so many by `generates(replica)`, and another one generates on the same weights; `most` times.
    """

    def __init__(self, generates: Callable[[int], int], terminate: Callable[[int], None], most: int) -> None:
        self.generates, self.terminate, self.most = generates, terminate, most
        self.told: list[int] = []
        self._next = 0.0

    def __call__(self, controller: Controller) -> None:
        if len(self.told) >= self.most or time.monotonic() < self._next or controller.state.trainer_done:
            return
        rooms = {room.replica: room.weight_id for room in controller.failover.rooms()}
        for replica, weight_id in rooms.items():
            others = [other for other in rooms if other != replica and rooms[other] == weight_id]
            if others and self.generates(replica) >= UNDER_WAY:
                self.told.append(replica)
                self._next = time.monotonic() + 1.0
                return self.terminate(replica)


def run(tmp_path, monkeypatch, **pipeline: object) -> tuple[Terminator, list[dict], dict]:
    """To its end, with replicas that are told to end again and again and come back; those who were told,
    every move, and the summary's figures. They report often enough that the controller knows of every local
    batch who generates on which weights."""
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(worker_line, "PING_SECONDS", 0.05)
    config = small_config(tmp_path, replicas=3, steps=5, **pipeline)
    config.emulation.time_scale = 10.0
    stand = Stand(config)

    def worker(replica: int) -> RolloutWorker:
        worker = stand.replicas[replica].worker
        assert worker is not None
        return worker

    def generates(replica: int) -> int:
        works = list(worker(replica).batch.trajectories.values())
        return sum(work.request_id is not None for work in works)

    terminator = Terminator(
        generates, lambda replica: worker(replica).context.channel.interrupt(Terminated()), most=3
    )
    stand.each_turn = terminator
    stand.run(120)
    assert_every_one_ended_once(config)
    assert terminator.told
    lives = config.rollout.replicas + len(terminator.told)
    assert stand.lives == lives, "each that was told left once, and came back"
    moves = rundata.load(tmp_path / "run").records.get("move", [])
    return terminator, moves, summary.build(tmp_path / "run")


def test_what_a_leaving_replica_generates_moves_with_its_kv(tmp_path, monkeypatch):
    """With eight responses under way or more, and increments off: no token is lost, and others go on without
    a prefill."""
    terminator, moves, figures = run(tmp_path, monkeypatch, repack="kv", repack_seconds=600.0)
    away = [move for move in moves if move["source"] in terminator.told]
    assert len(away) >= UNDER_WAY and any(move["prefix_tokens"] for move in away), moves
    assert figures["tokens_discarded"] == 0


def test_what_has_not_moved_in_time_is_handed_over(tmp_path, monkeypatch):
    """The tokens so far go on elsewhere, all of them."""
    monkeypatch.setattr(shutdown, "DRAIN_SECONDS", 0.0)
    _, moves, figures = run(tmp_path, monkeypatch, repack="off")
    handed = [move for move in moves if move["source"] is None]
    assert len(handed) >= UNDER_WAY and sum(move["tokens"] for move in handed) > 0, moves
    assert figures["tokens_discarded"] == 0


def test_it_gets_nothing_new_and_its_tokens_count(tmp_path):
    """No grant, no order to score, no move to it. What it hands over goes on at another replica at once,
    under the next attempt, from exactly these tokens; a later word of it on them counts for nothing."""
    script = scripted(tmp_path)
    first, _ = script.working(2)
    load = ReplicaLoad("draining", 0, 4, 0, kv_capacity=10_000, kv_tokens=100)
    for index in (0, 1):
        script.hear("rollout", index, Ping(load))
    script.hear("rollout", 0, Leaving())
    asked = script.sent(1, Reserve)
    assert sorted(reserve.trajectory_id for reserve in asked) == sorted(samples_of(first))
    script.controller.turn()
    again = script.sent(1, Reserve)
    assert len(again) == len(asked), "each destination is asked once for each"
    script.asks(0, 0, newest_batch=first.batch_id)
    assert script.granted(0) is None
    assert script.state().rooms == [1]
    for i, attempt in samples_of(first).items():
        partial = Partial(*columns([i, i + 1], [-1.0, -2.0]), [VersionSpan(0, 0, 2)], 1.0)
        script.hear("rollout", 0, Unfinished(i, attempt, partial), Unfinished(i, attempt, Partial()))
        known = script.known(i, attempt)
        assert known is not None and tokens_of(known).tolist() == [i, i + 1]
    script.hear("rollout", 0, Goodbye())
    assert script.state().generating.keys() == {1} and script.state().discarded == 0
    script.closes()


@pytest.mark.parametrize("refresh", ["drained", "interrupt"])
@pytest.mark.parametrize("known", [True, False])
def test_a_response_without_tokens_starts_again(tmp_path, known, refresh):
    """Of one that nobody knows a token of nothing is discarded, whether weights may come into responses or
    not."""
    script = scripted(tmp_path, refresh=refresh)
    (grant,) = script.working(1)
    if known:
        script.works(0, grant, 5)
    script.hear("rollout", 0, Leaving())
    for i, attempt in samples_of(grant).items():
        script.hear("rollout", 0, Unfinished(i, attempt, Partial()))
    script.hear("rollout", 0, Goodbye())
    again = script.joins(1)
    assert again is not None and samples_of(again).keys() >= samples_of(grant).keys()
    waits = known and refresh == "drained"  # else nobody who generates would take it
    assert {part.count for part in again.parts.values()} == ({5} if waits else set())
    assert script.state().discarded == (5 * len(samples_of(grant)) if known and not waits else 0)
    script.closes()


def test_a_response_of_several_policies_keeps_its_tokens(tmp_path):
    """pipeline=partial: it goes on at a replica that generates, on that one's weights, which are newer than
    its own."""
    script = scripted(tmp_path, refresh="interrupt", max_staleness=4)
    first, _ = script.working(2)
    script.publish(1, 0)
    newest = script.publish(2, 0)
    script.hear("rollout", 1, WeightsOpened(newest, 2, 0.1, {}, [], 0.0))
    script.hear("rollout", 1, Ping(ReplicaLoad("draining", newest, 4, 0, kv_capacity=10_000, kv_tokens=100)))
    script.hear("rollout", 0, Leaving())
    script.granted(1)  # what it was told so far
    for i, attempt in samples_of(first).items():
        spans = [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)]
        told = columns([i, i + 1, i + 2], [-1.0] * 3)
        script.hear("rollout", 0, Unfinished(i, attempt, Partial(*told, spans, 1.0)))
    asked = script.sent(1, Reserve)
    assert {reserve.trajectory_id for reserve in asked} == samples_of(first).keys()
    assert {reserve.weight_id for reserve in asked} == {newest} and script.state().discarded == 0
    script.closes()


@pytest.mark.slow
def test_responses_of_several_policies_are_handed_over(tmp_path, monkeypatch):
    """In a whole run: what is trained has all its tokens, and its weight id is that of the first of them."""
    monkeypatch.setattr(shutdown, "DRAIN_SECONDS", 0.0)
    _, moves, _ = run(tmp_path, monkeypatch, refresh="interrupt", max_staleness=4)
    assert sum(move["tokens"] for move in moves if move["source"] is None) > 0, moves
