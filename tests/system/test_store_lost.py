"""The controller's machine is lost: a real run goes on from the journal of its store."""

import shutil
import sqlite3

import pytest

from helpers.runs import Run, consumed, summary

STEPS = 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_when_store_dir_is_lost(tmp_path):
    """Promise: docs/promises.md#journal. The controller is killed, its local disk is gone, and the same
    command with another store_dir goes on as if nothing had happened: nothing is trained twice, and ids go on
    rising."""
    run_dir, words = tmp_path / "run", [f"steps={STEPS}", "checkpoint.every=2", "resume=auto"]
    run = Run(run_dir, *words, f"store_dir={tmp_path}/a")
    run.read_until(f"step  3/{STEPS}")
    run.rank("controller").kill()
    assert run.finish() == 1
    run.assert_gone()
    shutil.rmtree(tmp_path / "a")

    run = Run(run_dir, *words, f"store_dir={tmp_path}/b")
    line = run.read_until(f"{tmp_path}/b/run/store.sqlite was rebuilt from {run_dir}/journal")
    run.read_until("going on from the checkpoint of step ")
    assert "transaction " in line
    assert run.finish() == 0, run.lines
    batches = consumed(tmp_path / "b" / "run")
    assert sorted(batches) == list(range(STEPS)) and all(len(b) == 256 for b in batches.values())
    trained = [t for b in batches.values() for t in b]
    assert len(set(trained)) == len(trained), "trained twice"
    assert summary(run_dir)["trajectories_trained"] == STEPS * 256
    with sqlite3.connect(tmp_path / "b" / "run" / "store.sqlite") as store:
        weights = store.execute("SELECT id, restore_epoch FROM weights ORDER BY id").fetchall()
    assert [weight_id for weight_id, _ in weights] == list(range(len(weights)))
    assert {epoch for _, epoch in weights} == {0, 1} and weights == sorted(weights, key=lambda w: w[1])
