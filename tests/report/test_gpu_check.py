"""`make gpu-check`: one failure does not hide the rest, a second call goes on, verdicts name their cure; and
all its stages run, on the CPU with tiny shapes."""

import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from helpers.paths import BENCH

CHECK = BENCH / "gpu_check"
TOOK = "import json, sys; json.dump({'figures': {'rate': 0.5}}, open(sys.argv[-1], 'w'))"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The check as `python bench/gpu_check` has it."""
    monkeypatch.syspath_prepend(str(CHECK))
    monkeypatch.delitem(sys.modules, "stages", raising=False)
    spec = importlib.util.spec_from_file_location("gpu_check_main", CHECK / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stage(check: ModuleType, tmp_path: Path):
    """Makes a stage of a short program."""

    def make(name: str, program: str, seconds: float = 20.0, **more: object) -> object:
        script = tmp_path / f"{name}.py"
        script.write_text(program)
        words = f"{script}"
        return check.Stage(name, seconds, words, words, f"the cure of {name}", **more)

    return make


def called(check: ModuleType, out: Path, stages: list, monkeypatch, **more: object) -> dict[str, dict]:
    monkeypatch.setattr(check, "STAGES", tuple(stages))
    out.mkdir(exist_ok=True)
    options = SimpleNamespace(cpu=False, only=None, again=False, minutes=5.0, out=out, **more)
    return {each.name: result for each, result in check.results(options, {"device": "a GPU"})}


def test_each_stage_stands_alone_and_a_second_call_goes_on(check, stage, tmp_path, monkeypatch):
    """Promise: a stage that fails or hangs is named with its last words and its cure, and ended with all that
    it started; those behind it run. What was ok is not run again, what failed is."""
    pids, runs = tmp_path / "pids", tmp_path / "runs"
    note = f"open({str(runs)!r}, 'a').write('x');"
    hangs = (
        "import subprocess, sys, time\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleeper, start_new_session=True)\n"
        f"open({str(pids)!r}, 'a').write(f'{{child.pid}} ')\n"
        "print('waiting for nothing', flush=True)\n"
    )
    leaves = f"{hangs}time.sleep(2.5)\nraise SystemExit('gone')"
    hangs += "time.sleep(600)"
    stages = [
        stage("fails", f"{note} print('first'); raise SystemExit('no such thing')"),
        stage("hangs", hangs, seconds=4.0),
        stage("leaves", leaves),
        stage("lacks", TOOK, needs=("no_such_module",)),
        stage("good", f"{note}{TOOK}"),
    ]
    found = called(check, tmp_path / "out", stages, monkeypatch)
    assert [result["verdict"] for result in found.values()] == [
        "failed",
        "failed",
        "failed",
        "left out",
        "ok",
    ]
    assert found["fails"]["why"] == "exit code 1: no such thing"
    assert found["hangs"]["why"] == "not done after 4 s: waiting for nothing"
    assert found["lacks"]["why"] == "no_such_module: not installed"
    started = [int(pid) for pid in pids.read_text().split()]
    left = [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)]
    assert len(started) == 2 and not any(check.runs(process) for process in left)
    said = check.table(found)
    assert "fails: the cure of fails" in said and "rate 0.5" in said
    called(check, tmp_path / "out", [stages[0], stages[4]], monkeypatch)
    assert runs.read_text() == "xxx"


def test_a_figure_beyond_its_goal_is_low_and_names_its_cure(check, stage, tmp_path, monkeypatch):
    """Promise: on a GPU figures are judged, on the CPU they are shown; other shapes or another GPU run anew;
    no stage is begun when the minutes are over."""
    goals = (importlib.import_module("stages").Goal("rate", "more of it", at_least=0.7),)
    stages = [stage("slow", TOOK, goals=goals)]
    found = called(check, tmp_path / "out", stages, monkeypatch)["slow"]
    assert (found["verdict"], found["cures"]) == ("low", ["rate 0.5, goal >= 0.7: more of it"])
    assert check.judge(stages[0], found, on_gpu=False)["verdict"] == "ok"
    options = SimpleNamespace(cpu=False, only=None, again=False, minutes=0.0, out=tmp_path / "out")
    ((_, kept),) = check.results(options, {"device": "a GPU"})
    ((_, other),) = check.results(options, {"device": "another GPU"})
    assert (kept["verdict"], other["verdict"]) == ("low", "not reached")


def test_the_stages_end_in_time_and_each_has_a_cure(check):
    """Promise: 25 minutes, if no stage needs more than half of its limit, and for those that say most even if
    each of them hangs; every program and goal exists."""
    assert sum(stage.seconds for stage in check.STAGES) < 2 * 25 * 60
    limits = list(itertools.accumulate(stage.seconds for stage in check.STAGES))
    first = {stage.name for stage, until in zip(check.STAGES, limits, strict=True) if until <= 25 * 60}
    assert first >= {"doctor", "kernels", "kv", "trainer-0.5b", "engine-0.5b", "live", "load"}
    lines = check.listed().splitlines()[1:]
    assert [line.split()[0] for line in lines] == [stage.name for stage in check.STAGES]
    assert lines[-1].split()[2] == f"{limits[-1]:.0f}"
    for stage in check.STAGES:
        assert stage.cure and all(goal.cure and str(goal) for goal in stage.goals)
        for words in filter(None, (stage.gpu, stage.cpu)):
            assert words.startswith("-m ") or (CHECK.parents[1] / words.split()[0]).is_file(), words


def test_the_page_names_every_stage_and_its_goals(check):
    """docs/gpu_check.md is what a user reads before and after."""
    page = (CHECK.parents[1] / "docs" / "gpu_check.md").read_text()
    for stage in check.STAGES:
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        (line,) = [row for row in rows if f"`{stage.name}`" in row.split("|")[1]]
        assert all(f"`{goal.figure}` {goal}" in line for goal in stage.goals), stage.name


def test_without_a_gpu_it_is_refused_in_a_line():
    """It names the way to try it."""
    found = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "needs an NVIDIA GPU" in found.stderr and "--cpu" in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_stages_run_on_the_cpu(tmp_path):
    """Promise: the check itself is not what fails first on a GPU. Real engines, trainers, runs, in tiny."""
    words = [
        sys.executable,
        str(CHECK),
        "--cpu",
        "--out",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "json"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1450)
    stages = json.loads((tmp_path / "json").read_text())["stages"]
    assert {name: result["why"] for name, result in stages.items() if result["verdict"] != "ok"} == {}, (
        done.stdout
    )
    assert done.returncode == 0 and len(stages) == 16
    assert (
        stages["relay-killed"]["figures"]["killed"] >= 1 and stages["engine-killed"]["figures"]["killed"] == 1
    )
    assert stages["resume"]["figures"]["restored_step"] == 2
    assert stages["repack"]["figures"]["moves"] >= 1
    assert all(result["figures"].get("audit_culprits", 0) == 0 for result in stages.values())
