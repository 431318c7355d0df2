"""docs/promises.md#stored-when-generated: a complete response is never generated again, whoever dies
before its score comes; message by message."""

import shutil
from pathlib import Path

import pytest

from helpers.control.script import Script, samples_of
from helpers.emulated.stand import small_config
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import ResponsePlace, VersionSpan
from laminar_hpc.line.messages.moves import MoveAbort
from laminar_hpc.line.messages.rollouts import Generated, Increment, Lost
from laminar_hpc.rollout.partial_response import columns
from laminar_hpc.store.payload.reader import read
from laminar_hpc.store.payload.writer import FOLDER

TOKENS = 40


def new(folder: Path, replicas: int = 3) -> Script:
    config = small_config(folder, replicas, steps=8, prompts=2 * replicas, samples=2)
    config.rollout.increment_tokens = 10
    return Script(config)


def stored(script: Script) -> dict[int, list[int]]:
    """The response tokens of all groups that are finished."""
    return {whole.record.trajectory_id: whole.response.tokens.tolist() for whole in script.finished()}


def test_a_replica_dies_before_it_has_scored(tmp_path):
    """Its responses are scored by the others, in equal shares, none is granted again, no token is lost, and
    the score that it had sent after all counts once."""
    script = new(tmp_path)
    first, *_ = script.working(3)
    script.ends(0, first, TOKENS, scores=False)
    owned = samples_of(first)
    script.dies(0)
    orders = {index: script.ordered(index) for index in (1, 2)}
    assert sorted(o.trajectory_id for each in orders.values() for o in each) == sorted(owned)
    assert abs(len(orders[1]) - len(orders[2])) <= 1
    for index, each in orders.items():
        for order in each:
            i = order.trajectory_id
            [response] = read(script.run_dir, [(i, order.place)])
            assert order.attempt == owned[i]
            assert response.tokens.tolist() == [(i + k) % 50 for k in range(TOKENS)]
            (group,) = [g for g in first.groups if g.group_id == order.group.group_id]
            assert (order.group.prompt, order.group.row, order.group.samples) == (group.prompt, group.row, [])
            script.scores(index, i, order.attempt)
            assert script.state().refused == 0
    script.rollout(0, life="late")
    for i, attempt in owned.items():
        script.scores(0, i, attempt, life="late")
    assert (script.state().refused, script.state().discarded) == (len(owned), 0)
    assert stored(script).keys() == owned.keys() and script.state().ready_groups == len(first.groups)
    script.asks(1, 0)
    again = script.granted(1)
    assert again is None or not samples_of(again).keys() & owned.keys()
    script.ends_clean()


def test_the_scorer_dies_too_and_then_nobody_is_left(tmp_path):
    """The next one is asked; with nobody it waits until somebody serves weights."""
    script = new(tmp_path)
    first, *_ = script.working(3)
    script.ends(0, first, TOKENS, scores=False)
    script.dies(0)
    taken = {order.trajectory_id for order in script.ordered(1)}
    assert taken
    script.dies(1)
    assert {o.trajectory_id for o in script.ordered(2)} == samples_of(first).keys()
    script.dies(2)
    assert script.state().unscored == samples_of(first).keys()
    script.rollout(1, life="next")
    assert script.ordered(1, life="next") == [], "its reward workers are there when it serves weights"
    script.asks(1, 0, life="next")
    orders = script.ordered(1, life="next")
    assert {o.trajectory_id for o in orders} == samples_of(first).keys()
    for order in orders:
        script.scores(1, order.trajectory_id, order.attempt, life="next")
    assert stored(script).keys() == samples_of(first).keys() and script.state().unscored == set()
    script.ends_clean()


def test_the_controller_dies_before_the_score(tmp_path):
    """And all replicas with it. What it leaves behind is a store that knows the responses: the next
    controller has them scored, grants only what was not complete, under a later attempt, and the tokens are
    those that were generated."""
    script = new(tmp_path / "first")
    first, second, _ = script.working(3)
    script.ends(0, first, TOKENS, scores=False)
    before = script.controller.config
    shutil.copytree(before.run_dir, tmp_path / "second" / "run")  # as kill -9 leaves it: nothing is flushed
    script.ends_clean()

    config = small_config(tmp_path / "second", replicas=3, steps=8)
    config.algorithm, config.rollout = before.algorithm, before.rollout
    assert Path(config.run_dir) == tmp_path / "second" / "run"
    script = Script(config)
    owned = samples_of(first)
    assert not script.state().unscored, "their replicas may be alive"
    script.publish(0, 0)
    weight_id = script.newest
    for replica in (2, 1, 0):
        script.rollout(replica)
    assert script.state().unscored == owned.keys()
    script.asks(0, weight_id)
    orders = script.ordered(0)
    grant = script.granted(0)
    assert {o.trajectory_id: o.attempt for o in orders} == owned
    assert grant is not None and not samples_of(grant).keys() & owned.keys()
    lost = samples_of(second).keys() & samples_of(grant).keys()
    assert lost and all(samples_of(grant)[i] == samples_of(second)[i] + 1 for i in lost)
    for order in orders:
        script.scores(0, order.trajectory_id, order.attempt)
    assert stored(script) == {i: [(i + k) % 50 for k in range(TOKENS)] for i in owned}
    assert script.state().discarded == 0
    script.ends_clean()


def test_a_response_without_a_place_is_lost_with_a_reason_and_granted_again(tmp_path):
    """Nothing is stored of it, and the replica's score of it counts for nothing."""
    script = new(tmp_path)
    first, *_ = script.working(3)
    heard = script.hear

    def astray(role: str, index: int, *messages, life: str = "") -> None:
        for message in messages:
            if isinstance(message, Generated):
                message.trajectory.place = ResponsePlace("../../etc/passwd", 0, 100)
        heard(role, index, *messages, life=life)

    script.hear = astray
    script.ends(0, first, TOKENS)
    assert script.state().ready_groups == 0
    script.asks(1, 0, newest_batch=1)
    again = script.granted(1)
    assert again is not None
    assert {i: samples_of(again).get(i) for i in samples_of(first)} == {i: 1 for i in samples_of(first)}
    text = Path(script.run_dir, "metrics.jsonl").read_text()
    assert text.count('"kind":"lost"') == len(samples_of(first)) and "names no place" in text
    script.ends_clean()


@pytest.mark.parametrize("ends", ["scored", "granted", "lost"])
def test_a_damaged_response_is_granted_again(tmp_path, ends):
    """Whoever is to score it in the place of a dead replica finds that it is not what was generated. Whenever
    the run ends, its records are clean."""
    script = new(tmp_path)
    first, *_ = script.working(3)
    script.ends(0, first, TOKENS, scores=False)
    script.dies(0)
    orders = {index: script.ordered(index) for index in (1, 2)}
    damaged = orders[1][0]
    path = Path(script.run_dir, FOLDER, damaged.place.file)
    content = bytearray(path.read_bytes())
    content[damaged.place.offset + 100] ^= 1
    path.write_bytes(content)
    i, attempt = damaged.trajectory_id, damaged.attempt
    with pytest.raises(LaminarError, match=f"^the response of trajectory {i} is not in .* digest") as error:
        read(script.run_dir, [(i, damaged.place)])
    script.hear("rollout", 1, Lost(i, attempt, str(error.value)))
    if ends == "lost":
        script.ends_clean()
        return
    for index, each in orders.items():
        for order in each:
            script.scores(index, order.trajectory_id, order.attempt)
    script.asks(2, 0, newest_batch=2)
    again = script.granted(2)
    assert again is not None and samples_of(again).keys() & samples_of(first).keys() == {i}
    if ends == "granted":
        script.ends_clean()
        return
    script.ends(2, again, TOKENS)
    assert stored(script).keys() >= samples_of(first).keys()
    script.ends_clean()


def test_a_response_that_ends_while_it_moves_is_not_generated_again(tmp_path):
    """The move is called off, and when its replica dies the response is scored elsewhere, not moved."""
    script = new(tmp_path)
    first, *_ = script.working(3)
    i, attempt = next(iter(samples_of(first).items()))
    spans = [VersionSpan(0, 0, 10)]
    told = columns([(i + k) % 50 for k in range(10)], [-1.0] * 10)
    script.hear("rollout", 0, Increment(i, attempt, 0, *told, spans, 1.0))
    migration = script.controller.migration
    migration.begin(i, attempt, 0, 1, 0, 500, 0.0)
    script.ends(0, first, TOKENS, scores=False)
    assert migration.moving == {} and script.sent(1, MoveAbort)
    script.dies(0)
    orders = [order for index in (1, 2) for order in script.ordered(index)]
    assert {o.trajectory_id: o.attempt for o in orders} == samples_of(first)
    assert script.state().discarded == 0
    script.ends_clean()
