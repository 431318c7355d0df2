"""The lines that a user reads."""

from pathlib import Path

import pytest

from helpers import synthetic
from laminar_hpc.machine.observability import console
from laminar_hpc.report import summary


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0s"),
        (9.96, "10s"),
        (42, "42s"),
        (59.7, "1m00s"),
        (92, "1m32s"),
        (7500, "2h05m"),
    ],
)
def test_duration(seconds, text):
    """Promise: durations read at a glance."""
    assert console.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.7, "1.0k"),
        (6100, "6.1k"),
        (61000, "61k"),
        (999_600, "1.0M"),
        (2.4e6, "2.4M"),
    ],
)
def test_count(value, text):
    """Promise: counts take at most four characters."""
    assert console.count(value) == text


def test_step_lines_are_columns(finished):
    """Promise: the lines of all steps have the same columns and fit 120 characters, also with large and
    negative values."""
    steps = finished[1].steps
    extreme = {
        **steps[0],
        "step": 3,
        "reward_mean": -1.25,
        "response_length_mean": 1234.5,
        "response_length_max": 8192,
        "wait_seconds": 3000.0,
    }
    lines = [console.step_line(step, 60, 92.0) for step in [*steps, extreme]]
    assert (
        len({line.index("eta") for line in lines}) == 1 and len({line.index("stale") for line in lines}) == 1
    )
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("step  1/60  reward  0.") and lines[0].endswith("eta 1m32s")


def test_eta_is_the_median_of_recent_steps():
    """Promise: one slow step does not move the time left; before the first step there is none."""
    assert console.eta([], 60) is None
    assert console.eta([9.0, *[1.0] * 9, 50.0], 20) == 20.0


def test_evaluation_and_final_lines(finished):
    """Promise: the closing lines hold accuracy before and after, and where the run and its report lie."""
    record = {
        "name": "greedy",
        "file": "heldout",
        "samples": 1,
        "label": "after",
        "step": 60,
        "accuracy": 0.934,
        "problems": 256,
        "seconds": 4.2,
        "response_length_mean": 12.2,
    }
    assert "after  greedy   accuracy 0.934  heldout  256 problems  len" in console.evaluation_line(record)
    sampled = console.evaluation_line(
        {**record, "name": "sampled", "samples": 16, "file": "a-long-name-of-a-file-with-problems"}
    )
    assert "256 problems x 16" in sampled and len(sampled) <= 120
    assert console.evaluation_progress("greedy", "before", 12, 256).endswith(" 12/256 responses")
    text = "\n".join(
        console.final_lines(
            summary.build(finished[0]), Path("runs/demo"), Path("runs/demo/report.html"), "SIGINT"
        )
    )
    for part in (
        "12 steps",
        "(SIGINT)",
        "before 0.210   after 0.930   (sampled 0.880)\n",
        "before 0.105   after 0.465   (sampled 0.440)   harder",
        "24 groups whose rewards were all equal",
        "of what full groups would have taken",
        "runs/demo/report.html",
        "versions per trajectory 1",
    ):
        assert part in text


def test_a_figure_that_is_not_there_has_a_reason(finished):
    """Promise: a run that was stopped before its last evaluation says so where its accuracy would stand."""
    figures = {**summary.build(finished[0]), "accuracy_after": None, "accuracy_after_sampled": None}
    text = "\n".join(console.final_lines(figures, Path("runs/demo"), None, "SIGINT"))
    assert "before 0.210   after -   (stopped before the last evaluation)" in text


def test_final_lines_of_a_replay(finished, tmp_path):
    """Promise: where nothing was evaluated the closing lines do not speak of accuracy."""
    synthetic.replay_of(tmp_path / "again", finished[1])
    assert "accuracy" not in "\n".join(console.final_lines(summary.build(tmp_path / "again"), tmp_path, None))


def test_derived_block_is_aligned():
    """Promise: names and values stand in columns, bytes and missing bounds in words."""
    title, *lines = console.derived_block(
        {"trainer_ranks": 1, "publish_bytes": 3_111_111, "max_staleness": None, "wait_seconds": 92}
    )
    assert title == "this run"
    values = ["1", "3.1 MB", "none", "1m32s"]
    assert [line.split("  ")[-1].strip() for line in lines] == values
    assert len({line.rindex(value) for line, value in zip(lines, values, strict=True)}) == 1


def test_a_skipped_update_is_seen():
    """Promise: gradients that are not finite are no secret of the metrics: step, number and the limit are on
    the console."""
    assert console.skipped_line(7, 2, 5).endswith(
        "step 7: 2 updates had gradients that are not finite; 5 in a row end the run"
    )
