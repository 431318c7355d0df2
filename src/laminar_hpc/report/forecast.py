"""What a run foretells of itself: RUN_DIR/forecasts.jsonl, which simulator/self_forecast.py writes beside
`laminar top` and `laminar report`, in a process of its own that the run does not wait for."""

import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from laminar_hpc.machine.files import jsonl
from laminar_hpc.report.page import section
from laminar_hpc.report.rundata import FORECASTS, Run
from laminar_hpc.report.svg import row, tag

_PROGRAM = "laminar_hpc.simulator.self_forecast"  # by name: the simulator reads runs by this room
_EVERY_SECONDS = 60.0  # between two forecasts
_SHOWN = 3  # other settings


def newest(run_dir: Path) -> dict | None:
    """The newest forecast; None without one."""
    last = deque(jsonl.read(run_dir / FORECASTS), maxlen=1)
    return last[0] if last else None


class Forecaster:
    """Has a forecast made every minute, while somebody looks, and never waits for it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen | None = None
        self._next = 0.0

    def look(self) -> None:
        """Starts the next one where it is time."""
        if self._process is not None and self._process.poll() is None:
            return
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_SECONDS
            self._process = _started(self._run_dir)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def make(run_dir: Path, seconds: float) -> None:
    """One forecast now, if it is made within so many seconds."""
    process = _started(run_dir)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _started(run_dir: Path) -> subprocess.Popen:
    command = ["nice", sys.executable, "-m", _PROGRAM, str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _gain(line: dict, one: dict) -> float:
    """Of a forecast over that of the present settings."""
    return one["figures"]["tokens_per_second"] / line["now"]["figures"]["tokens_per_second"] - 1.0


def better(line: dict) -> list[dict]:
    """The forecasts of other settings that are worth a try, the best first."""
    least = line.get("gain_min", 0.0)  # lines of earlier versions are without
    worth = [other for other in line["others"] if _gain(line, other) >= least]
    return worth[:_SHOWN]


def text(line: dict, one: dict) -> str:
    """A forecast in words, with its gain."""
    seconds = one["figures"]["step_seconds"]
    return f"{' '.join(one['words'])}: {seconds:.2f} s per step ({_gain(line, one):+.0%} tokens/s)"


def _longer(line: dict) -> str:
    """By how much responses are expected to be longer than measured, where that shows."""
    more = line.get("growth", 1.0) - 1.0  # lines of earlier versions are without
    return f", responses {abs(more):.0%} {'longer' if more > 0 else 'shorter'}" if abs(more) >= 0.01 else ""


def parts(line: dict) -> list[str]:
    """The present settings, the best other ones, and what was foretold of the present ones."""
    happened, now, told = line["happened"], line["now"]["figures"], line["foretold"]
    measured = f"measured {happened['step_seconds']:.2f}, to step {line['step']}"
    found = [f"{now['step_seconds']:.2f} s per step as it is{_longer(line)} ({measured})"]
    found += [text(line, other) for other in better(line)]
    if told:
        found.append(
            f"foretold at step {told['step']} of {' '.join(told['words'])}: "
            f"{told['figures']['step_seconds']:.2f} s per step"
        )
    return found


def forecast_section(run: Run) -> str:
    """The report's section: measured, simulated and foretold; empty without a forecast."""
    line = newest(run.directory)
    if line is None:
        return ""
    rows = [("measured", line["happened"]), (f"as it is{_longer(line)}", line["now"]["figures"])]
    if told := line["foretold"]:
        rows.append((f"foretold at step {told['step']}: {' '.join(told['words'])}", told["figures"]))
    rows += [(" ".join(other["words"]), other["figures"]) for other in better(line)]
    head = row("settings", "tokens/s", "s per step", "trainer waits", "rollouts idle", cell="th")
    body = "".join(
        row(
            name,
            f"{f['tokens_per_second']:,.0f}",
            f"{f['step_seconds']:.2f}",
            f"{f['trainer_wait_share']:.0%}",
            f"{f['rollout_idle_share']:.0%}",
        )
        for name, f in rows
    )
    note = f"From this run's own measurements, up to step {line['step']}; more with laminar sim RUN_DIR."
    return section("Forecast", tag("table", head + body), note)
