"""The arithmetic of bench/chaos.py; tests/slurm/test_short_chaos.py runs the bench itself."""

import importlib
import signal
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import synthetic
from helpers.paths import BENCH
from laminar_hpc.report import rundata


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports a bench as its own command line would."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_a_seed_reproduces_a_sequence(load) -> None:
    """Promise: equal seeds give equal kinds, pauses and places; each kind comes once in each round."""
    sequence, kinds = load("chaos").sequence, load("chaos_faults").KINDS
    first = list(islice(sequence(kinds, 3, 20.0), 2 * len(kinds)))
    assert first == list(islice(sequence(kinds, 3, 20.0), 2 * len(kinds)))
    assert first != list(islice(sequence(kinds, 4, 20.0), 2 * len(kinds)))
    assert sorted(kind for _, kind, _ in first[: len(kinds)]) == sorted(kinds)
    assert all(10.0 <= pause <= 30.0 for pause, _, _ in first)


def test_faults_name_what_and_whom(load) -> None:
    """Promise: every kind is read, and has something that strikes; a word that is none is refused with those
    that are."""
    faults = load("chaos_faults")
    assert {faults.Fault.read(kind).how for kind in faults.KINDS} == set(faults.STRIKES)
    for word in ("kill-disk", "power-engine", "full-trainer", "flood-relay"):
        with pytest.raises(ValueError, match=f"{word} is none of kill-controller"):
            faults.Fault.read(word)


def test_what_came_of_a_fault(load, tmp_path: Path) -> None:
    """Promise: `back` counts from the death, or from the end of what had an end; of a lost replica only one
    that was not there before has come back; a publication under way at the fault does not count."""
    chaos, start = load("chaos"), synthetic.EPOCH
    tokens = {"prompt_tokens": 50, "response_tokens": 50}
    steps = [{"step": n, "time": start + 10 * n, "accuracy_mean": n / 10, **tokens} for n in (1, 2, 3, 4)]
    records = {
        "pull": [{"time": start + at, "replica": replica} for at, replica in ((5, 0), (16, 0), (27, 1))],
        "publish": [{"time": start + at, "seconds": 4.0} for at in (14, 21)],
        "relay": [],
    }
    launches = [rundata.RunLaunch(start, start + 40, None, None, {}, steps=steps)]
    run = rundata.Run(tmp_path, {}, launches, [], 0, records, {}, [])

    def came_of(fault: str, over: float) -> dict:
        return chaos.aftermath(run, {"fault": fault, "time": start + 12, "over": over})

    assert came_of("kill-trainer", 0) == {"published": 9, "back": 8}
    assert came_of("cable-trainer", 20) == {"published": 9, "back": 8}
    assert came_of("power-trainer", 9) == {"published": 9, "back": 9}
    assert (
        came_of("usr1-rollout", 0)
        == came_of("power-rollout", 9)
        == {"published": 9, "back": 15, "trainer_share": None}
    )
    assert came_of("kill-relay", 0)["back"] is came_of("usr1-trainer", 0)["back"] is None
    assert chaos.accuracies(run, None)["accuracy"] == pytest.approx(0.25)
    assert chaos.pace(run, start + 10, start + 30) == (0.1, 5.0), "steps and tokens per second"


def test_a_bench_that_stops_says_the_faults_so_far(load, tmp_path: Path, capsys, monkeypatch) -> None:
    """Promise: one that ends because no step is trained, or by Ctrl-C or TERM, prints its table first; what
    it ended by goes on, and with Ctrl-C the run is not waited for."""
    chaos, run_dir = load("chaos"), tmp_path / "run"
    synthetic.write(run_dir, steps=3)
    ended, row = [], {"fault": "kill-relay", "node": "n3", "time": synthetic.EPOCH, "step": 2, "over": 0.5}
    run = SimpleNamespace(
        run_dir=run_dir, submit=lambda: None, until_step=lambda *_: None, end=lambda: ended.append(1) or 0
    )
    monkeypatch.setattr(chaos, "SlurmRun", lambda *_: run)
    options = SimpleNamespace(experiment="demo", overrides=[], rollouts=2, spare=False, limit=60.0, calm=0.0)
    for error, ends in ((SystemExit("no step after step 2"), 1), (KeyboardInterrupt(), 1)):
        with pytest.raises(type(error)), chaos.running(options, None, "faults") as running:
            with chaos.said_at_a_stop(running, [row]):
                raise error
        said = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in said] == [["fault", "node"], ["kill-relay", "n3"]]
        assert len(ended) == ends


def test_a_folder_with_runs_in_it_is_refused(load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Promise: runs of an earlier command are not mixed with new ones; the line names the folder."""
    chaos = load("chaos")
    (tmp_path / "alone").mkdir()
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--runs-dir", str(tmp_path)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test's own process keeps its handlers
    with pytest.raises(SystemExit, match=f"--runs-dir: {tmp_path} is not empty"):
        chaos.main()
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]
