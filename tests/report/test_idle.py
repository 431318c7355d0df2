"""Idle fractions, pinned on spans made by hand."""

import pytest

from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.report import rundata
from laminar_hpc.report.idle import idle_fraction, overlap, training_windows, union
from laminar_hpc.report.timeline import accounts


def make_run(tmp_path, *, launches=(0.0,), **processes):
    """A run with these spans: process name -> [(kind, t0, t1)]."""
    metrics = jsonl.Appender(tmp_path / "metrics.jsonl")
    for start in launches:
        metrics.write({"kind": "start", "time": start, "restored_step": None})
    for name, spans in processes.items():
        trace = Trace(tmp_path, name[:-1], int(name[-1]))
        for kind, t0, t1 in spans:
            trace.record(kind, t0, t1)
        trace.close()
    return rundata.load(tmp_path)


def test_union_counts_overlap_once():
    """Promise: a process that does two things at once is busy once."""
    assert union([(3, 4), (0, 2), (1, 2.5), (4, 4)]) == [(0, 2.5), (3, 4)]
    assert overlap([(0, 2.5), (3, 4)], [(1, 3.5)]) == 2.0


def test_idle_is_what_no_activity_covers_between_first_batch_and_last_step(tmp_path):
    """Promise: waiting, untraced time, background sending and scoring are idle; loading and evaluating
    outside the window do not count."""
    run = make_run(
        tmp_path,
        trainer0=[
            ("load", 0, 10),
            ("wait", 8, 10),
            ("train", 10, 14),
            ("publish", 14, 15),
            ("send", 15, 19),
            ("wait", 15, 18),
            ("train", 18, 20),
            ("checkpoint", 20, 25),
        ],
        rollout0=[
            ("load", 0, 8),
            ("generate", 8, 16),
            ("pull", 16, 17),
            ("score", 17, 20),
            ("evaluate", 22, 30),
        ],
        rollout1=[("generate", 5, 12), ("generate", 11, 15), ("wait", 15, 25)],
    )
    assert training_windows(run) == [(10, 20)]
    assert idle_fraction(run, "trainer") == pytest.approx(0.3)  # 15..18
    assert idle_fraction(run, "rollout") == pytest.approx((3 + 5) / 20)
    assert idle_fraction(run, "relay") is None


def test_time_between_launches_is_nobodys_idle_time(tmp_path):
    """Promise: a run resumed after a night is not idle for the night."""
    spans = {
        "trainer0": [("train", 1, 2), ("train", 3, 4), ("train", 1001, 1003)],
        "rollout0": [("generate", 0, 4), ("generate", 1001, 1002)],
    }
    run = make_run(tmp_path, launches=(0.0, 1000.0), **spans)
    assert training_windows(run) == [(1, 4), (1001, 1003)]
    assert idle_fraction(run, "trainer") == pytest.approx(1 / 5)
    assert idle_fraction(run, "rollout") == pytest.approx(1 / 5)


def test_accounts_add_up(tmp_path):
    """Promise: the parts of a process's time add up to the window, each moment in one part."""
    run = make_run(
        tmp_path,
        trainer0=[("train", 0, 4), ("wait", 4, 6), ("publish", 3, 5), ("train", 7, 10)],
        rollout0=[("generate", 0, 9)],
    )
    parts = {name: {kind: seconds for kind, seconds, _ in row} for name, row in accounts(run)}
    assert parts["trainer0"] == {"train": 6, "publish": 2, "wait": 1, "untraced": 1}
    assert parts["rollout0"] == {"generate": 9, "untraced": 1}
