"""Whether this machine's GPU runs all of the system, and how fast: every stage of bench/gpu_check/stages.py
in a process and a time limit of its own, then one table with verdicts and cures.

    python bench/gpu_check                      all of it, on one GPU, in at most 25 minutes
    python bench/gpu_check --only kernels kv    some of it
    python bench/gpu_check --cpu                the same stages with tiny shapes on the CPU: tries the check
    python bench/gpu_check --again              also the stages that were ok before
    python bench/gpu_check --list               the stages in their order, with limits and goals; runs nothing

`make gpu-check` does the first. A second call goes on where the first one ended: what was ok or low is kept,
unless GPU, torch or SGLang are others; what failed or was not reached runs again. --out holds each stage's
log and result.

A verdict is one of: ok; low, a figure misses its goal; failed, with the last line of its log; left out, with
what is not installed; not reached, as the minutes were over. The exit code is 0 when all stages are ok or
left out. On the CPU no figure is judged.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
from stages import STAGES, Stage

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 15.0  # for a stage that is told to end
LOOK_SECONDS = 0.5  # between two looks at what a stage has started
LEAST_SECONDS = 20.0  # with less than this left no stage is begun
KEPT, GOOD = ("ok", "low"), ("ok", "left out")


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    about = __doc__ or ""
    options = argparse.ArgumentParser(
        prog="python bench/gpu_check",
        description=about.partition("\n\n")[0],
        epilog=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [stage.name for stage in STAGES]
    options.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU, nothing is judged")
    options.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=f"of: {', '.join(names)}")
    options.add_argument("--list", action="store_true", help="print the stages and run nothing")
    options.add_argument("--again", action="store_true", help="run also what was ok or low before")
    options.add_argument("--minutes", type=float, default=25.0, help="for all stages (default 25)")
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-check", help="default %(default)s")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    return options.parse_args(words)


def gpu_names() -> list[str]:
    """By the driver; [] without one. Torch is asked by the stages only, each in its own process."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(": ", 1)[-1].split(" (")[0] for line in listed.stdout.splitlines() if "GPU " in line]


def facts(device: str) -> dict[str, str]:
    """What results belong to."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    packages = ("torch", "triton", "sglang", "megatron-core", "transformer_engine")
    return {"device": device, **{package: version(package) for package in packages}}


def missing(stage: Stage) -> list[str]:
    """Modules that the stage needs and that are not installed."""
    return [name for name in stage.needs if importlib.util.find_spec(name.partition(".")[0]) is None]


# ---- one stage ---------------------------------------------------------------------------------------------


class Watched:
    """A stage's process and everything that was ever seen below it: what it leaves behind when it dies has
    other parents by then."""

    def __init__(self, command: list[str], output: IO[bytes]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench"), "PYTHONUNBUFFERED": "1"}
        self.process = psutil.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.below: set[psutil.Process] = set()

    def wait(self, limit: float) -> int | None:
        """Its exit code; None when it still runs after `limit` seconds."""
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            self.look()
            try:
                return self.process.wait(min(left, LOOK_SECONDS))
            except psutil.TimeoutExpired:
                continue
        return None

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):
            self.below.update(self.process.children(recursive=True))

    def end(self) -> None:
        """All of it has ended on return: told to, or killed."""
        self.look()
        left = [self.process, *self.below]
        for how in ("terminate", "kill"):
            for each in left:
                with contextlib.suppress(psutil.Error):
                    getattr(each, how)()
            until = time.monotonic() + END_SECONDS
            while (left := [each for each in left if runs(each)]) and time.monotonic() < until:
                time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    """A zombie has ended; whoever took it over has only not asked yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def run(stage: Stage, words: str, out: Path, limit: float) -> dict:
    """Runs the stage to its end, or its limit. Returns its result."""
    log, figures = out / f"{stage.name}.log", out / f"{stage.name}.figures.json"
    figures.unlink(missing_ok=True)
    command = [
        sys.executable,
        *words.format(out=out).split(),
        *(["--json", str(figures)] if stage.figures else []),
    ]
    began = time.monotonic()
    with open(log, "wb") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        watched = Watched(command, output)
        try:
            code = watched.wait(limit)
        finally:
            watched.end()
    why = f"exit code {code}: {last_line(log)}" if code else ""
    if code is None:
        why = f"not done after {limit:.0f} s: {last_line(log)}"
    found = json.loads(figures.read_text())["figures"] if figures.exists() else {}
    if not why and stage.figures and not found:
        why = "it ended without figures"
    return {"figures": found, "why": why, "seconds": time.monotonic() - began, "log": str(log)}


def judge(stage: Stage, result: dict, on_gpu: bool) -> dict:
    """The result with its verdict and its cures."""
    if result["why"]:
        return {**result, "verdict": "failed", "cures": [stage.cure]}
    low = [
        goal
        for goal in stage.goals
        if on_gpu
        and result["figures"].get(goal.figure) is not None
        and not goal.met(result["figures"][goal.figure])
    ]
    cures = [f"{goal.figure} {result['figures'][goal.figure]:.3g}, goal {goal}: {goal.cure}" for goal in low]
    return {**result, "verdict": "low" if low else "ok", "cures": cures}


def without_running(verdict: str, why: str, cure: str) -> dict:
    return {"figures": {}, "why": why, "seconds": 0.0, "log": "", "verdict": verdict, "cures": [cure]}


# ---- all stages --------------------------------------------------------------------------------------------


def results(options: argparse.Namespace, known: dict[str, str]) -> Iterator[tuple[Stage, dict]]:
    """Runs what must run, in order; each result is on the disk before the next stage begins."""
    until = time.monotonic() + 60 * options.minutes
    for stage in STAGES:
        words = stage.cpu if options.cpu else stage.gpu
        if not words or (options.only and stage.name not in options.only):
            continue
        key = hashlib.sha256(json.dumps([words, known]).encode()).hexdigest()[:16]
        file = options.out / f"{stage.name}.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        if before.get("key") == key and before["verdict"] in KEPT and not options.again:
            yield stage, before
            continue
        left = until - time.monotonic()
        if lacking := missing(stage):
            needed = ", ".join(lacking)
            result = without_running("left out", f"{needed}: not installed", "make setup installs all")
        elif left < LEAST_SECONDS:
            over = f"{options.minutes:g} minutes are over"
            result = without_running("not reached", over, "call it again: it goes on here")
        else:
            print(f"{stage.name} ...", file=sys.stderr, flush=True)
            limit = min(left, stage.seconds * (2 if options.cpu else 1))
            result = judge(stage, run(stage, words, options.out, limit), not options.cpu)
            if result["verdict"] == "failed" and limit == left and "not done" in result["why"]:
                result["verdict"] = "not reached"
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({**result, "key": key}, indent=1))
        partial.replace(file)
        yield stage, result


def shown(stage: Stage, figures: dict) -> str:
    """The stage's figures in one line, those with a goal first."""
    judged = [goal.figure for goal in stage.goals if figures.get(goal.figure) is not None]
    names = [*judged, *(name for name in figures if name not in judged and figures[name] is not None)]
    return ", ".join(f"{name} {figures[name]:.3g}" for name in names[:6])


def table(found: dict[str, dict]) -> str:
    stages = {stage.name: stage for stage in STAGES}
    width = max(len(name) for name in found)
    lines = [f"{'stage':{width}}  {'seconds':>7}  verdict"]
    for name, result in found.items():
        said = shown(stages[name], result["figures"]) if result["verdict"] in KEPT else result["why"]
        lines.append(f"{name:{width}}  {result['seconds']:7.1f}  {result['verdict']:<11}  {said}".rstrip())
    for name, result in found.items():
        if result["verdict"] not in GOOD:
            lines += [f"{name}: {cure}" for cure in result["cures"]]
            lines += [f"{name}: its log is {result['log']}"] if result["log"] else []
    return "\n".join(lines)


def listed() -> str:
    """The stages in their order: limits in seconds, alone and up to there, and goals."""
    width, until, lines = max(len(stage.name) for stage in STAGES), 0.0, list[str]()
    for stage in STAGES:
        until += stage.seconds
        goals = ", ".join(f"{goal.figure} {goal}" for goal in stage.goals)
        lines.append(f"{stage.name:{width}}  {stage.seconds:7.0f}  {until:5.0f}  {goals}".rstrip())
    return "\n".join([f"{'stage':{width}}  {'limit/s':>7}  {'sum/s':>5}  goals", *lines])


def main() -> None:
    options = options_of()
    if options.list:
        return print(listed())
    names = gpu_names()
    if not names and not options.cpu:
        sys.exit(
            "gpu-check needs an NVIDIA GPU, and nvidia-smi names none here; run it on a machine that has "
            "one, or with --cpu, which tries the check itself with tiny shapes"
        )
    known = facts("CPU" if options.cpu else names[0])
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {stage.name: result for stage, result in results(options, known)}
    print(table(found).replace("{out}", str(options.out)))
    print("  ".join(f"{name} {value}" for name, value in known.items()))
    if options.json:
        partial = options.json.with_name(f".{options.json.name}.{os.getpid()}")
        partial.write_text(json.dumps({"machine": known, "stages": found}, indent=1) + "\n")
        partial.replace(options.json)
    sys.exit(0 if all(result["verdict"] in GOOD for result in found.values()) else 1)


if __name__ == "__main__":
    main()
