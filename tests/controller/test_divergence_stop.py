"""A run that diverges ends in order, after a checkpoint, and counts as failed."""

from pathlib import Path

from helpers.control.script import scripted
from helpers.made import Made
from laminar_hpc.line.messages.training import Leave, StepDone, TrainerDone
from laminar_hpc.policies.metrics import batch_metrics
from laminar_hpc.report import rundata, summary

WHY = "3 of the last 4 updates were skipped, the last at step 1: 9 of 9 trajectories are left out"


def test_the_guards_word_ends_the_run_and_stands_in_its_records(tmp_path: Path) -> None:
    """Promise: the trainer is told to leave with its checkpoint, the run has failed with the guard's words,
    and store, metrics, report and console say what was left out."""
    said: list[str] = []
    script = scripted(tmp_path, say=said.append)
    record = Made(7, 0, [1], [2, 3], [-1.0, -1.0]).record()
    told = {"wait_seconds": 0.1, "train_seconds": 0.1, "guard_left_out": 1.0, "guard_skipped_updates": 2.0}
    metrics = batch_metrics([record], 1, 0) | told
    left_out = {7: "log-prob mismatch 4 above 0.2 nats"}
    script.hear("trainer", 0, StepDone(0, metrics, {7: (4.0, 0)}, left_out, "9 of 9 are left out", WHY))
    assert isinstance(script.hub.left["trainer:0:"][-1], Leave)
    script.hear("trainer", 0, TrainerDone(1))
    state = script.state()
    assert state.finished and state.failure.startswith(f"{WHY}. A checkpoint is written, but")
    assert any("left out 1/1" in line for line in said)
    assert "guard        step 1: 2 updates skipped: 9 of 9 are left out" in said
    assert any(line.startswith("stopping     training diverges: ") for line in said)
    script.closes()
    run = rundata.load(Path(script.controller.config.run_dir))
    assert run.left_out([6, 7]) == left_out
    figures = summary.figures(run)
    assert (figures["guard_left_out"], figures["guard_skipped_updates"]) == (1, 2)
