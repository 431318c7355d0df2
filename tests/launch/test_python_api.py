"""`laminar_hpc.Run`: a run from Python, as docs/observing.md shows it."""

import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

import laminar_hpc
from helpers import synthetic
from helpers.emulated.short_run import record
from helpers.paths import ROOT
from helpers.processes import free_port
from helpers.runs import SHORT, assert_clean
from laminar_hpc.launch import python_api
from laminar_hpc.machine.files import jsonl
from laminar_hpc.store.checkpoints import steps as checkpoints

EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs/observing.md").read_text(), re.S)[1]
QUICK = [  # a real trainer, an engine without a model
    *("rollout.engine=emulated", "evaluation.files=[]", "emulation.median_response_tokens=20"),
    *("sampling.max_response_tokens=48", "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4"),
]


def example(*words: str) -> str:
    """The page's lines, with these words in place of the steps."""
    assert '"steps=20"' in EXAMPLE
    return EXAMPLE.replace('"steps=20"', ", ".join(map(repr, words)))


def listening(run: laminar_hpc.Run) -> list[psutil.Process]:
    """Processes of the run that listen; fails where other machines reach one."""
    found = []
    for process in psutil.Process(run._process._process.pid).children(recursive=True):
        ports = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert all(ip == "::1" or ip.startswith("127.") for ip, _ in ports), (process.cmdline(), ports)
        found += [process] if ports else []
    return found


def goes_on(run: laminar_hpc.Run, seconds: float = 60.0) -> None:
    """Waits until the controller has just written that it does."""
    deadline = time.monotonic() + seconds
    while run.state != "going on":
        assert time.monotonic() < deadline, run
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_runs(tmp_path: Path) -> None:
    """The page's lines run as they stand: a line for each step while the run goes on, figures, and DataFrames
    at the end. With the metrics' port open all that listens does so on loopback, and a scrape agrees."""
    port, shown, seen = free_port(), list[tuple](), dict[str, object]()
    names: dict[str, object] = {}

    def look(*words: object) -> None:
        shown.append(words)
        if len(shown) == 1:
            run = names["run"]
            goes_on(run)
            seen["ranks"] = len(listening(run))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                seen["scraped"] = answer.read().decode()

    words = ["steps=4", *QUICK, f"run_dir={tmp_path / 'run'}", f"observability.prometheus={port}"]
    names["print"] = look
    exec(example(*words), names)
    run = names["run"]
    assert [line[0] for line in shown[:4]] == [1, 2, 3, 4]
    assert seen["ranks"] >= 4 and 'laminar_run_info{pipeline="laminar",run="run"' in seen["scraped"]
    assert re.search(r"laminar_steps_done_total\{run=\"run\"\} [1-4]\.0", seen["scraped"])
    assert run.state == "ended" and names["figures"]["steps"] == 4
    assert [step["step"] for step in run] == [1, 2, 3, 4], "a second loop begins with the first step"
    assert list(names["steps"].index) == [1, 2, 3, 4] and names["steps"].response_tokens.min() > 0
    trained = names["trained"].dropna(subset=["step"])
    assert (
        len(trained) == 4 * 32 and set(trained.step) == {1, 2, 3, 4} and trained.response.str.len().min() > 0
    )
    assert f"http://127.0.0.1:{port}/metrics" in run.output and "step 4/4" in run.output
    assert_clean(tmp_path / "run")
    assert [step["step"] for step in laminar_hpc.Run.open(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_is_stopped_and_goes_on_from_python(tmp_path: Path) -> None:
    """The real engine: `stop` finishes the step, writes a checkpoint and gives the figures; the run goes on
    with resume=auto, and, opened as a run of another process, is followed and stopped as well."""
    words = [*SHORT, "steps=60", "checkpoint.every=100", f"run_dir={tmp_path / 'run'}"]
    run = laminar_hpc.Run(*words)
    for step in run:
        assert 0.0 <= step["reward_mean"] <= 1.0
        if step["step"] == 2:
            break
    figures = run.stop()
    assert 2 <= figures["steps"] < 60 and checkpoints(run.run_dir) == [figures["steps"]]
    again = laminar_hpc.Run(*words, "resume=auto")
    first = next(iter(again))
    assert first["step"] == figures["steps"] + 1, "those of the launch before are not this one's"
    other = laminar_hpc.Run.open(run.run_dir)
    goes_on(other)
    assert next(iter(other))["step"] == 1
    ended = other.stop(120)
    assert ended["steps"] >= first["step"] and again.wait(60) == ended
    assert list(again.steps().index) == list(range(1, ended["steps"] + 1))
    assert_clean(run.run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_ends_in_order_with_its_kernel(tmp_path: Path) -> None:
    """When the Python process is killed the run finishes its step and writes a checkpoint; nothing is left of
    it. An interrupt of the cell does not reach it."""
    program = f"""
import laminar_hpc, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a kernel hears it, also where the tests do not
run = laminar_hpc.Run("experiment=demo", "steps=500", *{QUICK!r}, "run_dir={tmp_path / "run"}")
print(run._process._process.pid, flush=True)
for step in run:
    if step["step"] == 1:
        try:
            os.killpg(0, signal.SIGINT)
            run.wait(5)
        except KeyboardInterrupt:
            pass
    if step["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    kernel = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    command = psutil.Process(int(kernel.stdout.readline()))
    assert kernel.wait(200) == -signal.SIGKILL
    tree = [command, *command.children(recursive=True)]
    _, left = psutil.wait_procs(tree, timeout=60)
    assert not left
    (end,) = jsonl.read(tmp_path / "run/metrics.jsonl", "end")
    assert end["reason"] == "SIGTERM" and 3 <= end["step"] < 500
    assert checkpoints(tmp_path / "run")[-1] == end["step"]


def test_what_is_wrong_is_said_as_the_command_says_it(tmp_path: Path) -> None:
    """All mistakes of the words at once; what the command finds later when it is waited for."""
    with pytest.raises(laminar_hpc.LaminarError) as error:
        laminar_hpc.Run("experiment=demo", "steps=0", "sed=1")
    first, second = sorted(str(error.value).splitlines())
    assert first.startswith("sed: no such key (did you mean seed?)")
    assert second.startswith("steps=0: must be at least 1")
    with pytest.raises(laminar_hpc.LaminarError, match="starts one run"):
        laminar_hpc.Run("experiment=demo", "--multirun")
    run = laminar_hpc.Run("experiment=demo", "data.train=none.jsonl", f"run_dir={tmp_path / 'run'}")
    for wait in (lambda: run.wait(60), lambda: list(run)):
        with pytest.raises(laminar_hpc.LaminarError, match=r"^data.train=none.jsonl") as error:
            wait()
        assert "laminar: error" not in str(error.value) and str(error.value) in run.output
    assert run.state == "died" and not (tmp_path / "run").exists()


def test_a_dry_run_prints(tmp_path: Path) -> None:
    """`dry_run=true` ends at once, with what would start in `output`, without an earlier run's figures."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"steps": 3}')
    run = laminar_hpc.Run("experiment=demo", "dry_run=true", f"run_dir={tmp_path / 'run'}")
    assert run.wait(60) == {} and list(run) == [] and "trainer ranks" in run.output


def test_runs_that_have_ended(tmp_path: Path) -> None:
    """A run that died, or failed, raises after its last step; one that ended in order does not. Steps are
    those that led to the weights."""
    died = tmp_path / "died"
    synthetic.write(died, steps=7, crash=True, start=time.time() - 900)
    run, seen = laminar_hpc.Run.open(died), list[int]()
    with pytest.raises(laminar_hpc.LaminarError, match="died: no end was recorded; resume=auto resumes it"):
        for step in run:
            seen.append(step["step"])
    assert seen == [1, 2, 3, 4, 5, 6, 7] and run.state == "died"
    synthetic.write(died, steps=10, start_step=4, start=time.time() - 400, seed=1)
    assert [step["step"] for step in run] == [*range(1, 8), *range(5, 11)] and run.state == "ended"
    table = run.steps()
    assert list(table.index) == list(range(1, 11)) and {"kind", "seal"}.isdisjoint(table.columns)
    assert run.stop() == {}, "there is nothing to stop, and no summary was written"
    metrics = jsonl.Appender(died / "metrics.jsonl")
    metrics.write({"kind": "start", "time": time.time(), "restored_step": 10, "pipeline": "laminar"})
    metrics.write({"kind": "end", "time": time.time(), "reason": "failed: the disk is gone", "step": 10})
    with pytest.raises(laminar_hpc.LaminarError, match=r"^the disk is gone$"):
        run.wait(10)
    with pytest.raises(laminar_hpc.LaminarError, match="is no run"):
        laminar_hpc.Run.open(tmp_path / "none")


def test_an_earlier_run_in_the_folder_is_not_this_one(tmp_path: Path) -> None:
    """Steps of a run that lies in the folder until this one moves it aside are not given."""
    synthetic.write(tmp_path / "run", steps=3, start=time.time() - 900)
    run = laminar_hpc.Run.open(tmp_path / "run")
    run._begun, run._process = time.time(), Ending(tmp_path / "run")
    assert [step["step"] for step in run] == [1, 2]


class Ending:
    """A process that moves the earlier run aside, writes a longer one and ends."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._looks = 0

    @property
    def code(self) -> int | None:
        self._looks += 1
        if self._looks == 3:
            self._run_dir.rename(self._run_dir.with_name("aside"))
            synthetic.write(self._run_dir, steps=2, start=time.time(), groups=64)
        return 0 if self._looks > 4 else None

    def raise_if_failed(self) -> None:
        """It has not."""


def test_trajectories_are_those_of_the_export(tmp_path: Path) -> None:
    """Rows of the steps that are asked for, and without a last one those that wait too."""
    run = laminar_hpc.Run.open(record(tmp_path))
    everything, first = run.trajectories(), run.trajectories(1, 1)
    assert set(first.step) == {1} and len(first) < len(everything) and everything.step.isna().any()
    assert {"prompt", "response", "reward", "weight_id", "logprobs"} <= set(first.columns)
    assert all(len(row.logprobs) == len(row.response_tokens) for row in first.itertuples())


def test_without_pandas_a_line_says_so(tmp_path: Path, monkeypatch) -> None:
    """And nothing else needs it."""
    synthetic.write(tmp_path / "run", steps=2)
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = laminar_hpc.Run.open(tmp_path / "run")
    assert len(list(run)) == 2
    for ask in (run.steps, run.trajectories):
        with pytest.raises(laminar_hpc.LaminarError, match="pandas is not installed here: pip"):
            ask()


def test_an_import_brings_nothing_along() -> None:
    """Neither `import laminar_hpc` nor the command line waits for the notebook's part, pandas or Prometheus'
    client; what a notebook imports brings no torch."""
    program = """
import sys
import laminar_hpc
assert [name for name in sys.modules if name.startswith("laminar_hpc.")] == []
from laminar_hpc.launch import cli
unwanted = {"laminar_hpc.launch.python_api", "pandas", "prometheus_client", "torch", "hydra"}
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
laminar_hpc.Run
assert not {"pandas", "prometheus_client", "torch"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert python_api.LaminarRun is laminar_hpc.Run
    with pytest.raises(AttributeError, match="no attribute 'Rum'"):
        laminar_hpc.Rum  # noqa: B018 (asks for it)
