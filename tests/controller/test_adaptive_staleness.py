"""pipeline.max_staleness=auto in the controller: each step's weights get their bound before anybody has them,
the next controller knows it, and the audit holds each trajectory to that of its weights."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.staleness import StalenessControl
from laminar_hpc.machine.files import jsonl
from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.report import rundata
from laminar_hpc.store.audit.records import read
from laminar_hpc.store.audit.steps import staleness_is_bounded
from laminar_hpc.store.store import Store


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    with closing(Store(tmp_path)) as made:
        yield made


def held_back(control: StalenessControl, step: int, now: float, seconds: float) -> None:
    """A step that begins at `now`: the trainer waits for so long though enough has finished, and trains for
    ten seconds more."""
    live = LiveGroups()
    for number in range(1, 17):
        live.put(GroupView(number, number, 0, finished=True, finish_order=number))
    control.trainer_waits(now, step, live, 16, 16)
    control.trainer_takes(now + seconds, step, live, 0)
    control.step_done(now + seconds + 10.0, step + 1)


def test_a_bound_is_written_before_its_weights_are_there(tmp_path, store):
    """The wait of step 1 raises the bound of step 3's weights: those of step 2 may be on their way. Another
    controller over the store has the same bounds, and goes on from them."""
    config = small_config(tmp_path, max_staleness="auto:4")
    control = StalenessControl(config, store)
    control.trainers_start(0)
    assert store.bounds() == {0: 2, 1: 2}
    held_back(control, 0, 0.0, 100.0)  # the first step has no beginning
    held_back(control, 1, 110.0, 10.0)
    assert store.bounds() == {0: 2, 1: 2, 2: 2, 3: 3} and control.figures() == {"staleness_bound": 3}

    following = StalenessControl(config, store)
    assert [following.of_weights(step) for step in range(4)] == [2, 2, 2, 3]
    following.trainers_start(2)
    assert store.bounds() == {0: 2, 1: 2, 2: 2, 3: 3}, "no promise changes"
    held_back(following, 2, 0.0, 0.0)
    held_back(following, 3, 10.0, 40.0)
    assert store.bounds()[5] == 4, "never above the maximum"


def test_a_fixed_bound_keeps_what_an_adaptive_one_has_promised(tmp_path, store):
    """After a restart with max_staleness=0 the bound falls by one a step from where it was."""
    control = StalenessControl(small_config(tmp_path, max_staleness="auto"), store)
    control.trainers_start(0)
    held_back(control, 0, 0.0, 0.0)
    held_back(control, 1, 10.0, 30.0)
    fixed = StalenessControl(small_config(tmp_path, max_staleness=0), store)
    assert [fixed.of_weights(step) for step in range(9)] == [2, 2, 2, 5, 4, 3, 2, 1, 0]
    assert fixed.figures() == {} and StalenessControl(small_config(tmp_path), store).bounds is None


def test_a_whole_run_is_within_the_bounds_of_its_weights(tmp_path):
    """Real workers over emulated engines: each trained trajectory keeps the bound of its weights, each step's
    line has the newest one, and the audit names a trajectory that is beyond its own."""
    config = small_config(tmp_path, steps=6, max_staleness="auto:3")
    Stand(config).run(90)
    assert_every_one_ended_once(config)
    run_dir = tmp_path / "run"
    with closing(sqlite3.connect(run_dir / "store.sqlite")) as store:
        rows = store.execute("SELECT key, value FROM meta WHERE key LIKE 'bound of step %'").fetchall()
    bounds = {int(key.rpartition(" ")[2]): int(value) for key, value in rows}
    assert set(range(6)) <= bounds.keys() and max(bounds.values()) <= 3
    consumed = rundata.load(run_dir).consumed
    assert all(t.staleness_training <= bounds[t.weight_step] for t in consumed)
    lines = [line for line in jsonl.read(run_dir / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["staleness_bound"] for line in lines] == [bounds[line["step"] + 1] for line in lines]
    with read(run_dir) as records:
        assert records.store is not None
        assert not any(staleness_is_bounded(records, records.store))
        late = next(t for t in consumed if t.staleness_training > 0)
        records.store.meta[f"bound of step {late.weight_step}"] = str(late.staleness_training - 1)
        assert any(
            f"trajectory {late.id}:" in (line or "") for line in staleness_is_bounded(records, records.store)
        )
