"""The summary's figures, against synthetic runs whose history is known."""

import json
from types import SimpleNamespace

import pytest

from helpers import synthetic
from helpers.synthetic import EPOCH
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.machine.files import jsonl
from laminar_hpc.report import document, rundata, summary
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read
from laminar_hpc.store.journal import Journal
from laminar_hpc.store.recovery import settle
from laminar_hpc.store.store import Store

KEYS = [
    "accuracy_before",
    "accuracy_after",
    "accuracy_after_sampled",
    "evaluations",
    "steps",
    "trajectories_trained",
    "trajectories_to_070",
    "response_tokens_trained",
    "restarts",
    "wall_seconds",
    "tokens_per_second",
    "max_versions_per_trajectory",
    "staleness_generation_mean",
    "staleness_generation_max",
    "staleness_training_mean",
    "staleness_training_max",
    "trainer_idle_fraction",
    "rollout_idle_fraction",
    "publish_stall_seconds_mean",
    "publish_bytes_over_full_mean",
    "publish_changed_fraction_mean",
    "pull_seconds_mean",
    "logprob_mismatch_mean",
    "logprob_mismatch_max",
    "guard_left_out",
    "guard_skipped_updates",
    "reward_errors",
    "reward_error_first",
    "rewards",
    "environment",
    "trajectories_moved",
    "trajectories_rescued",
    "trajectories_rescued_by_load",
    "tokens_moved",
    "prefill_tokens_saved",
    "move_seconds_mean",
    "move_seconds_max",
    "replicas_told_to_end",
    "trajectories_parked",
    "tokens_parked",
    "bytes_parked",
    "parked_tokens_taken_up",
    "parked_trajectories_prefilled",
    "groups_filtered",
    "tokens_discarded",
    "reports_refused",
    "tokens_saved",
    "tokens_saved_fraction",
    "pipeline",
]


def test_a_finished_run(finished):
    """Promise: every figure is there under its name, and equals what the files say."""
    run_dir, written = finished
    found = summary.write(rundata.load(run_dir))
    assert list(found) == KEYS
    assert json.loads((run_dir / "summary.json").read_text()) == found
    assert (found["accuracy_before"], found["accuracy_after"], found["accuracy_after_sampled"]) == (
        0.21,
        0.93,
        0.88,
    )
    assert (found["steps"], found["pipeline"], found["max_versions_per_trajectory"]) == (12, "laminar", 1)
    assert found["trajectories_trained"] == len(written.consumed) == 12 * 32
    assert found["response_tokens_trained"] == sum(length for *_, length in written.consumed)
    assert found["reward_errors"] == sum(step["reward_error_count"] for step in written.steps)
    assert found["staleness_training_max"] == 2
    assert found["wall_seconds"] == pytest.approx(written.end - written.start)


def test_evaluations_of_several_files(finished):
    """Promise: accuracy_before and _after are those of the first file; `evaluations` has every file's, greedy
    and sampled."""
    assert summary.build(finished[0])["evaluations"] == {
        "heldout": {"before": 0.21, "after": 0.93, "before_sampled": 0.17, "after_sampled": 0.88},
        "harder": {"before": 0.105, "after": 0.465, "before_sampled": 0.085, "after_sampled": 0.44},
    }


def test_groups_filtered_and_tokens_saved_are_those_of_the_history(resumed):
    """Promise: steps that were done again count once; the share is of what full groups would have taken."""
    run_dir, before, after = resumed
    found, history = summary.build(run_dir), before.steps[:4] + after.steps
    saved, generated = sum(s["tokens_saved"] for s in history), sum(s["tokens_generated"] for s in history)
    assert (found["groups_filtered"], found["tokens_saved"]) == (20, round(saved))
    assert found["tokens_saved_fraction"] == pytest.approx(saved / (saved + generated), abs=1e-3)


def test_tokens_per_second_is_a_batch_over_the_time_between_updates(finished):
    """Promise: the paper's metric: the first update opens the clock, so its batch does not count."""
    _, written = finished
    tokens = sum(step["prompt_tokens"] + step["response_tokens"] for step in written.steps[1:])
    seconds = written.steps[-1]["time"] - written.steps[0]["time"]
    assert summary.build(finished[0])["tokens_per_second"] == pytest.approx(tokens / seconds)


def test_stored_staleness_agrees_with_the_steps(finished):
    """Promise: the staleness shown per trajectory, computed from the store, is the one that the trainer
    measured per batch."""
    run = rundata.load(finished[0])
    for step in run.steps:
        batch = [t for t in run.consumed if t.consumed_step == step["step"] - 1]
        assert sum(t.staleness_training for t in batch) / len(batch) == pytest.approx(
            step["staleness_training_mean"]
        )
        assert sum(t.staleness_generation for t in batch) / len(batch) == pytest.approx(
            step["staleness_generation_mean"]
        )


def test_a_resumed_run_counts_every_step_once(resumed):
    """Promise: steps beyond the restored one are abandoned; totals are those of the history that led to the
    weights."""
    run_dir, before, after = resumed
    run, found = rundata.load(run_dir), summary.build(run_dir)
    history = before.steps[:4] + after.steps
    assert [step["step"] for step in run.steps] == list(range(1, 11)) and run.abandoned_steps == 3
    assert found["steps"] == 10
    assert found["trajectories_trained"] == 10 * 32
    assert found["response_tokens_trained"] == sum(step["response_tokens"] for step in history)
    assert found["accuracy_before"] == 0.21 and found["accuracy_after"] == 0.93
    crashed_at = max(
        record["time"] for record in jsonl.read(run_dir / "metrics.jsonl") if record["time"] < after.start
    )
    assert found["wall_seconds"] == pytest.approx(crashed_at - before.start + after.end - after.start)
    spent = (
        before.steps[3]["time"] - before.steps[0]["time"] + after.steps[-1]["time"] - after.steps[0]["time"]
    )
    tokens = sum(s["prompt_tokens"] + s["response_tokens"] for s in before.steps[1:4] + after.steps[1:])
    assert found["tokens_per_second"] == pytest.approx(tokens / spent)


def test_a_batch_taken_by_a_step_that_never_came_to_its_end_does_not_count(tmp_path):
    """Promise: what the store marks as consumed by a step that died is not counted as trained."""
    written = synthetic.write(tmp_path / "run", steps=3, crash=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if not ('"kind":"step"' in line and '"step":3' in line)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(kept) + '\n{"kind":"step","ste')
    found = summary.build(tmp_path / "run")
    assert found["steps"] == 2 and found["trajectories_trained"] == 64
    assert found["response_tokens_trained"] == sum(step["response_tokens"] for step in written.steps[:2])
    assert found["accuracy_after"] is None


def test_a_store_elsewhere_is_found(tmp_path):
    """Promise: with store_dir, the summary reads the store from there."""
    run_dir = tmp_path / "run"
    synthetic.write(run_dir, steps=2)
    (tmp_path / "local" / "run").mkdir(parents=True)
    (run_dir / "store.sqlite").rename(tmp_path / "local" / "run" / "store.sqlite")
    with open(run_dir / "config.yaml", "a") as file:
        file.write(f"store_dir: {tmp_path / 'local'}\n")
    assert len(rundata.load(run_dir).consumed) == 64


def test_a_store_of_another_machine_is_read_from_the_journal(tmp_path, monkeypatch, capsys):
    """Promise: `laminar report` and `laminar audit` tell the same on a machine that has no store of the run,
    or one that others have gone on from elsewhere; the copy that they make is gone after it."""
    run_dir, local, scratch = tmp_path / "run", tmp_path / "local" / "run", tmp_path / "scratch"
    synthetic.write(run_dir, steps=3)
    local.mkdir(parents=True), scratch.mkdir()
    (run_dir / "store.sqlite").rename(local / "store.sqlite")
    with open(run_dir / "config.yaml", "a") as file:
        file.write(f"store_dir: {local.parent}\n")
    settle(run_dir / "journal", local / "store.sqlite", print)
    old = (local / "store.sqlite").read_bytes()
    store = Store(local, journal=Journal(run_dir / "journal", local / "store.sqlite", print))
    store.rows.note_mismatches({0: (0.25, 1)})
    store.close()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    cli.run(["report", str(run_dir)])
    expected = (run_dir / "summary.json").read_text(), (run_dir / "report.html").read_text()
    with read(run_dir) as records:
        audited = [str(finding) for finding in audit(records)]
    for elsewhere in (None, old):
        (local / "store.sqlite").unlink()
        if elsewhere is not None:
            (local / "store.sqlite").write_bytes(elsewhere)
        cli.run(["report", str(run_dir)])
        assert expected == ((run_dir / "summary.json").read_text(), (run_dir / "report.html").read_text())
        assert rundata.load(run_dir).mismatches([0]) == {0: (0.25, 1)}
        with read(run_dir) as records:
            assert [str(finding) for finding in audit(records)] == audited and not records.damage
        assert not list(scratch.iterdir())
        (local / "store.sqlite").write_bytes(old)
    (run_dir / "journal").rename(run_dir / "journal.away")
    (local / "store.sqlite").unlink()
    assert rundata.load(run_dir).consumed == []


def test_a_replay_has_no_invented_figures(finished, tmp_path):
    """Promise: what the files do not hold is null: a replay evaluates nothing, publishes nothing and has no
    rollouts."""
    synthetic.replay_of(tmp_path / "again", finished[1])
    found = summary.build(tmp_path / "again")
    assert (found["steps"], found["trajectories_trained"], found["pipeline"]) == (12, 12 * 32, "laminar")
    missing = (
        "accuracy_before",
        "accuracy_after",
        "rollout_idle_fraction",
        "publish_stall_seconds_mean",
        "pull_seconds_mean",
        "logprob_mismatch_max",
    )
    assert [found[name] for name in missing] == [None] * len(missing)
    assert found["response_tokens_trained"] == sum(step["response_tokens"] for step in finished[1].steps)


def test_a_run_without_a_step(tmp_path):
    """Promise: a run that failed before its first step has a summary of zeros and nulls."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind":"start","time":5.0,"restored_step":null,"pipeline":"sync","derived":{}}\n'
    )
    found = summary.build(tmp_path)
    assert (found["steps"], found["trajectories_trained"], found["pipeline"]) == (0, 0, "sync")
    assert (
        found["tokens_per_second"] is None
        and found["trainer_idle_fraction"] is None
        and found["max_versions_per_trajectory"] is None
    )


def test_no_run_is_refused_in_one_line(tmp_path):
    """Promise: a folder that is no run is said to be none."""
    with pytest.raises(LaminarError, match=r"is no run: no metrics\.jsonl there"):
        summary.build(tmp_path)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.9, 0.9], None),  # less than three steps
        ([0.1, 0.9, 0.9, 0.2, 0.9, 1.0, 0.9], 60),  # 0.63, 0.67, 0.67, then 0.70 exactly
        ([0.7, 0.7, 0.7], 30),
        ([0.6] * 9, None),
    ],
)
def test_trajectories_to_070(accuracies, expected):
    """Promise: trajectories trained when the mean accuracy of three batches in a row first reached 0.70."""
    assert (
        summary.trajectories_to_goal([{"trajectories": 10, "accuracy_mean": a} for a in accuracies])
        == expected
    )


def test_mixed_versions_are_seen(tmp_path):
    """Promise: a trajectory generated with two weight ids shows up, by the engine's own report in the
    store."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    steps = [
        {
            "kind": "step",
            "time": EPOCH,
            "step": 1,
            "trajectories": 1,
            "prompt_tokens": 1,
            "response_tokens": 2,
            "accuracy_mean": 0.0,
        }
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    store = synthetic.Store(run_dir)
    row = synthetic.trajectory(1, 0, prompt="1+1=", response=">2", versions=(0, 1))
    synthetic.store_rows(store, [row], 0)
    store.close()
    assert summary.build(run_dir)["max_versions_per_trajectory"] == 2


def test_restarts_are_counted_and_listed_with_their_causes(tmp_path):
    """Promise: who looks at a run afterwards sees how often it died, why, and where it went on."""
    run_dir = tmp_path / "run"
    before = synthetic.write(run_dir, steps=7, crash=True)
    metrics = jsonl.Appender(run_dir / "metrics.jsonl")
    cause = "relay 0 (pid 7 on node) has died"
    metrics.write({"kind": "restart", "time": before.end + 1, "cause": cause, "step": 7, "restored_step": 4})
    metrics.close()
    synthetic.write(run_dir, steps=10, start_step=4, start=before.end + 10, seed=1)
    assert summary.build(run_dir)["restarts"] == 1 and summary.build(run_dir)["steps"] == 10
    page = document.write(rundata.load(run_dir)).read_text()
    assert f"because: {cause}" in page and "step 4" in page


def test_the_first_reward_error_is_the_first_by_time() -> None:
    """Promise: it is the one that the console names, whichever trajectory was granted first."""
    scored = [(3.0, "third"), (1.0, ""), (2.0, "second")]
    consumed = [SimpleNamespace(time_scored=at, reward_error=error) for at, error in scored]
    assert summary.reward_error_first(SimpleNamespace(has_old_steps=False, consumed=consumed)) == "second"
    assert summary.reward_error_first(SimpleNamespace(has_old_steps=False, consumed=consumed[1:2])) is None
