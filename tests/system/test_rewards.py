"""Runs with rewards that fail, with several rewards and with a reward model behind a URL: what a user sees,
and what is on record.

Controller and replicas are real processes with emulated engines, so that a run takes seconds; the last test
is a real one.
"""

import asyncio
import io
import json
import re
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from helpers.emulated.launch import Emulation, prepare
from helpers.runs import Run, metrics
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.report import document, top
from laminar_hpc.report.live import RunFollower
from laminar_hpc.report.rundata import load

FUNCTIONS = """
def fails(*, prompt, response, row): raise KeyError("no_such_field")
def sometimes(*, prompt, response, row):
    if sum(map(ord, response)) % 3 == 0: raise ValueError("of three")
    return {"reward": 1.0, "accuracy": 1.0}
def short(*, prompt, response, row): return -1.0
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A small emulated run of three steps, in a folder with the user's functions."""
    (tmp_path / "rewards_of_user.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    found = prepare(tmp_path, prompts=64, prompt_tokens=8, max_response_tokens=64)
    found.rollout.replicas, found.steps, found.evaluation.files = 2, 3, []
    found.algorithm.prompts_per_step, found.algorithm.samples_per_prompt = 8, 4
    found.emulation.median_response_tokens, found.emulation.time_scale = 20.0, 20.0
    return found


def finished(config: RunConfig) -> tuple[int | None, str, float]:
    """Exit code and output of the run, and its seconds."""
    t0 = time.monotonic()
    emulation = Emulation(config, 1e-6, per_process=2)
    try:
        code = emulation.wait(60)
    finally:
        emulation.stop(patience=5.0)
    return code, Path(f"{config.run_dir}.log").read_text(), time.monotonic() - t0


def seen_in_top(run_dir: str) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(top.frame(RunFollower(Path(run_dir)).look()))
    return console.export_text()


def test_a_reward_that_always_raises_ends_the_run(config):
    """Warned about before anything starts; the first batch ends the run, exit code 1, with the error and
    the cure, before a step."""
    config.reward.function = "rewards_of_user.fails"
    code, printed, seconds = finished(config)
    assert code == 1 and seconds < 40
    assert "warning: reward.function='rewards_of_user.fails' failed on the first row" in printed
    assert printed.count("reward       the first error, trajectory") == 1
    assert (
        "first 32 responses, a whole batch, all failed, the last with: KeyError: 'no_such_field'" in printed
    )
    assert metrics(Path(config.run_dir), "step") == []
    assert metrics(Path(config.run_dir), "end")[0]["reason"].startswith("failed: the rewards of the first 32")


def test_errors_are_seen_everywhere(config):
    """A reward that fails now and then: in the step line, in `top`, at the end, in summary and report,
    with the first error's words."""
    short = {"function": "rewards_of_user.short", "weight": 0.5}
    config.reward.functions = {"right": {"function": "rewards_of_user.sometimes"}, "short": short}
    config.reward.function = ""
    code, printed, _ = finished(config)
    run_dir = Path(config.run_dir)
    assert code == 0, printed
    summary = json.loads((run_dir / "summary.json").read_text())
    failed = [t.reward_error for t in load(run_dir).consumed]
    errors = sum(map(bool, failed))
    assert 0 < errors < 96 and summary["reward_errors"] == errors
    assert summary["reward_error_first"] == "right: ValueError: of three"
    assert summary["rewards"] == {
        "right": {"first": 1.0, "last": 1.0},
        "short": {"first": -1.0, "last": -1.0},
    }
    steps = metrics(run_dir, "step")
    for step in steps:
        assert (
            f"reward errors {step['reward_error_count']:.0f}/32" in printed or not step["reward_error_count"]
        )
        assert step["reward_mean/right"] == 1.0 and step["reward_mean"] == pytest.approx(
            0.5 - step["reward_error_count"] / 32
        )
    assert f"errors in {errors} of 96 trajectories trained, the first: right: ValueError: of three" in printed
    assert "first and last step: right 1.000 to 1.000, short -1.000 to -1.000" in printed
    assert "the first: right: ValueError: of three" in seen_in_top(config.run_dir)
    page = document.write(load(run_dir)).read_text()
    assert (
        "mean of each reward function per batch" in page
        and f"<td>{errors}</td><td>right: ValueError: of three</td>" in page
    )


class JudgeThread:
    """A reward model on loopback, whose replies stop being rewards when `broken`."""

    def __init__(self) -> None:
        self.broken = False
        self._loop, self._up = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    def _serve(self) -> None:
        self._loop.run_until_complete(self._start())
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/score", self._score)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/score"

    async def _score(self, request: web.Request) -> web.Response:
        body = await request.json()
        good = {"reward": len(body["response"]) % 2}
        return web.json_response({"detail": "out of memory"} if self.broken else good)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.mark.slow
def test_a_reward_model_that_breaks_down_ends_the_run(config):
    """Its first step is trained; when a whole batch has failed later, the run stops in order, fails, and
    can go on with resume=auto."""
    judge, run_dir = JudgeThread(), Path(config.run_dir)
    config.reward.function, config.reward.functions, config.steps = "", {"judge": {"url": judge.url}}, 1000
    emulation = Emulation(config, 1e-6, per_process=2)
    try:
        until = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").exists() or not metrics(run_dir, "step"):
            assert time.monotonic() < until and emulation.controller.poll() is None
            time.sleep(0.05)
        judge.broken = True
        code = emulation.wait(60)
    finally:
        emulation.stop(patience=5.0)
        judge.stop()
    printed = Path(f"{config.run_dir}.log").read_text()
    assert code == 1 and len(metrics(run_dir, "step")) < 1000, printed
    assert "responses, a whole batch, all failed, the last with: judge: " in printed
    assert "no 'reward' in its reply" in printed
    stopped = r"every reward fails: (finishing step \d+, then|no step is under way;) a checkpoint"
    assert re.search(stopped, printed)


@pytest.mark.slow
def test_a_real_run_whose_reward_always_raises(tmp_path, monkeypatch):
    """`laminar train`: exit code 1, one error line, within seconds of the first batch, and nothing is left
    behind."""
    (tmp_path / "rewards_of_user.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "run", "reward.function=rewards_of_user.fails")
    assert run.finish() == 1
    (error,) = [line for line in run.lines if line.startswith("laminar: error:")]
    assert (
        "the rewards of the first 256 responses, a whole batch, all failed" in error
        and "mend reward.function" in error
    )
    run.assert_gone()


def test_a_reward_that_is_not_there_is_refused_by_a_dry_run(tmp_path, monkeypatch):
    """Exit code 2 and one line, by dry_run=true and before anything starts."""
    (tmp_path / "rewards_of_user.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    functions = {
        "no_such_module.f": "cannot be imported: ModuleNotFoundError",
        "rewards_of_user.f": "has no 'f'",
    }
    for dry, (function, says) in zip(("true", "false"), functions.items(), strict=True):
        run = Run(tmp_path / "run", f"reward.function={function}", f"dry_run={dry}")
        assert run.finish(60) == 2 and says in run.lines[-1] and len(run.errors) == 1, run.lines
        assert not (tmp_path / "run").exists()
