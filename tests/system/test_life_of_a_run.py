"""One run on real parts through its whole life: killed, resumed, stopped, resumed, finished, replayed."""

import shutil
import signal
import time

import pytest

from helpers.runs import Run, consumed, metrics, summary
from laminar_hpc.store.checkpoints import checkpoint_path, read_state

STEPS = 99  # so many that the end is not reached before it is stopped, however late a busy machine does so
SMALL, TRAJECTORIES = ("algorithm.prompts_per_step=4", "evaluation.problems=8"), 32


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("life") / "run"


@pytest.mark.timeout(600)
def test_kill_resume_stop_resume(run_dir):
    """A relay dies: with restarts=1 the run goes on by itself, and one line says why. Then TERM: the step is
    finished, checkpointed, exit 0, everything gone. The same command goes on, to fewer steps. At the end
    docs/promises.md#one-policy and #nothing-lost hold over all launches, and a further start ends at
    once."""
    words = ["checkpoint.every=2", "resume=auto", *SMALL]
    run = Run(run_dir, f"steps={STEPS}", *words, "restarts=1")
    run.read_until(f"step  3/{STEPS}")
    assert not run.listens_beyond_loopback()
    run.rank("relay").kill()
    why = run.read_until("restart  ")
    assert "1 of 1 within an hour, from the checkpoint of step " in why and "relay 0 (pid " in why
    restored = int(run.read_until("going on from the checkpoint of step ").split()[-1])
    (restart,) = metrics(run_dir, "restart")
    # every second step has a checkpoint, and so has the last one if the trainer was told to leave
    assert restored == restart["restored_step"] and (restored % 2 == 0 or restored == restart["step"])
    run.read_until(f"step {restored + 2:>2}/{STEPS}")
    run.stop(signal.SIGTERM)
    assert run.finish() == 0, run.lines
    assert not run.errors
    run.assert_gone()
    stopped_at = metrics(run_dir, "end")[-1]["step"]
    assert restored + 2 <= stopped_at < STEPS - 1

    steps = stopped_at + 2
    words.append(f"steps={steps}")
    run = Run(run_dir, *words)
    run.read_until(f"going on from the checkpoint of step {stopped_at}")
    assert run.finish() == 0, run.lines
    run.assert_gone()

    figures = summary(run_dir)
    assert figures["steps"] == steps and figures["trajectories_trained"] == steps * TRAJECTORIES
    assert figures["max_versions_per_trajectory"] == 1
    assert figures["staleness_training_max"] <= 2
    assert figures["logprob_mismatch_max"] < 1e-3
    assert figures["accuracy_after"] is not None and figures["accuracy_before"] is not None
    batches = consumed(run_dir)
    assert sorted(batches) == list(range(steps)) and all(len(b) == TRAJECTORIES for b in batches.values())
    trained = [t for b in batches.values() for t in b]
    assert len(set(trained)) == len(trained), "trained twice"
    assert figures["restarts"] == 1 and (run_dir / "report.html").stat().st_size > 20_000

    begun = time.monotonic()
    run = Run(run_dir, *words)
    assert run.finish() == 0 and time.monotonic() - begun < 20  # a second or two on a quiet machine
    assert len(run.lines) == 1 and "is complete at step" in run.lines[0]


@pytest.mark.timeout(400)
def test_replay_and_resume_are_bit_exact(run_dir, tmp_path):
    """`source=replay`: weights, optimizer and RNG after a resume hash equal to an uninterrupted run's on the
    same batches: a run that has lost its last checkpoint, and of which the one before is damaged, says so and
    trains those steps again."""
    kept = ["checkpoint.every=2", "checkpoint.keep=3", "checkpoint.state_hash=true"]
    words = [f"source=replay:{run_dir}", *kept, "steps=5", *SMALL]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = Run(whole, *words)
    assert run.finish() == 0, run.lines
    shutil.copytree(whole, parts)
    shutil.rmtree(checkpoint_path(parts, 5))
    with open(checkpoint_path(parts, 4) / "rng" / "00000.pt", "r+b") as file:
        file.truncate(100)
    run = Run(parts, *words, "resume=auto")
    line = run.read_until("is taken instead")
    assert "checkpoint step_000004 is damaged (rng/00000.pt has 100 of its " in line
    run.read_until("going on from the checkpoint of step 2")
    assert run.finish() == 0, run.lines
    for step in (4, 5):
        ends = [read_state(checkpoint_path(folder, step))["state_hash"] for folder in (whole, parts)]
        assert ends[0] == ends[1] != read_state(checkpoint_path(whole, 2))["state_hash"]
    assert summary(parts)["steps"] == 5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sync_with_two_trainers_and_two_replicas(tmp_path):
    """pipeline=sync: every trajectory is on-policy. Data parallel 2 and two replicas; Ctrl-C ends it in
    order."""
    run = Run(tmp_path / "run", "pipeline=sync", "trainer.data_parallel=2", "rollout.replicas=2", "steps=2")
    assert run.finish() == 0, run.lines
    figures = summary(tmp_path / "run")
    assert figures["staleness_training_max"] == 0 and figures["pipeline"] == "sync" and figures["steps"] == 2
    assert figures["max_versions_per_trajectory"] == 1 and figures["logprob_mismatch_max"] < 1e-3
