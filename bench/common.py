"""What the benches share: real runs through the `laminar` command, figures per step from a run's files, one
table, one JSON file.

Each run is a subprocess in a folder of its own, bounded by a time limit; a run that fails ends the bench with
the last lines it said.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from laminar_hpc.report import rundata, summary
from laminar_hpc.report.idle import busy, overlap, training_windows, union
from laminar_hpc.report.rundata import Run

if TYPE_CHECKING:
    from laminar_hpc.store.payload.whole import Whole

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # for tests/helpers
STOP_SECONDS = 60.0  # for an orderly stop of a run that took too long


def options_of(about: str) -> argparse.ArgumentParser:
    """The option that every bench has."""
    options = argparse.ArgumentParser(
        description=about.partition("\n\n")[0],
        epilog=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--json", type=Path, metavar="PATH", help="write figures, raw rows and machine facts there"
    )
    return options


def parser(about: str) -> argparse.ArgumentParser:
    """The options that every bench of runs has."""
    options = options_of(about)
    options.add_argument(
        "--repeats", type=int, default=3, help="measured runs of each kind; figures are medians (default 3)"
    )
    options.add_argument("--steps", type=int, help="trainer steps per run (default: the experiment's own)")
    options.add_argument("--experiment", default="demo", help="default demo")
    options.add_argument(
        "--runs-dir", type=Path, help="keep the runs there (default: a temporary folder that is removed)"
    )
    options.add_argument(
        "--run-seconds", type=float, default=1200.0, help="time limit of one run (default 1200)"
    )
    options.add_argument("overrides", nargs="*", metavar="key=value", help="settings for every run")
    return options


def words(read: Callable[[str], object]) -> Callable[[str], list[str]]:
    """The type of an option that takes words with commas between them. `read` raises ValueError for one that
    is wrong."""

    def taken(text: str) -> list[str]:
        for word in (found := text.split(",")):
            try:
                read(word)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        return found

    return taken


@contextmanager
def run_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Where the runs of this bench go."""
    if options.runs_dir:
        options.runs_dir.mkdir(parents=True, exist_ok=True)
        yield options.runs_dir
        return
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        yield Path(folder)


def train(
    options: argparse.Namespace, folder: Path, name: str, settings: Mapping[str, object], again: bool = False
) -> Run:
    """One run to its end: `laminar train experiment=... run_dir=folder/name key=value ...`; `again`: over
    what an earlier one has left there. Raises SystemExit when it fails."""
    run_dir = folder / name
    if not again:
        shutil.rmtree(run_dir, ignore_errors=True)
    steps = {"steps": options.steps} if options.steps else {}
    words = [
        f"experiment={options.experiment}",
        *(f"{k}={v}" for k, v in {**steps, **settings, "run_dir": run_dir}.items()),
        *options.overrides,
    ]
    log = folder / f"{name}.log"
    print(f"  {name}: laminar train {' '.join(words)}", file=sys.stderr, flush=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "laminar_hpc.launch.cli", "train", *words],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=options.run_seconds)
        except subprocess.TimeoutExpired:
            code = f"still running after {options.run_seconds:.0f} s"
        finally:
            end(process)
    if code != 0:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"{name} failed ({code}); it said last:\n{said}")
    return rundata.load(run_dir)


def end(process: subprocess.Popen) -> None:
    """Stops a run in order, and if that does not help, at once. Its children end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue


# ---- figures of a run --------------------------------------------------------------------------------------


def tokens_per_second(run: Run, skip: int) -> float:
    """As in summary.json, without the first `skip` steps."""
    steps = run.steps[max(1, skip) :]
    before = run.steps[max(1, skip) - 1]["time"]
    return sum(step["prompt_tokens"] + step["response_tokens"] for step in steps) / (
        steps[-1]["time"] - before
    )


def seconds_to_accuracy(run: Run) -> float | None:
    """From the first trajectory requested to the step when the batches' accuracy (mean of three steps)
    reached 0.70; None if never."""
    began = min((s.t0 for spans in run.spans.values() for s in spans if s.kind == "generate"), default=None)
    steps = run.steps
    for index in range(summary.GOAL_STEPS - 1, len(steps)):
        recent = steps[index + 1 - summary.GOAL_STEPS : index + 1]
        if began is not None and statistics.fmean(step["accuracy_mean"] for step in recent) >= summary.GOAL:
            return steps[index]["time"] - began
    return None


def window(run: Run, skip: int) -> tuple[float, float]:
    """From the end of step `skip` to the end of the last step's training."""
    ((_, end),) = training_windows(run)  # one launch
    return run.steps[max(1, skip) - 1]["time"], end


def seconds_per_step(run: Run, skip: int) -> dict[str, float]:
    """Where the time goes: seconds per step of each role and kind (mean over its processes), `work` (any
    process busy) and `all`."""
    start, end = window(run, skip)
    steps = len(run.steps) - max(1, skip)
    found = {"all": (end - start) / steps}
    everyone = union(interval for spans in run.spans.values() for interval in busy(spans))
    found["work"] = overlap(everyone, [(start, end)]) / steps
    for role, kinds in {
        "trainer": ("train", "wait", "publish", "checkpoint"),
        "rollout": ("generate", "wait", "pull"),
    }.items():
        processes = [spans for name, spans in run.spans.items() if name.rstrip("0123456789") == role]
        for kind in kinds:
            total = sum(overlap(busy(spans, (kind,)), [(start, end)]) for spans in processes)
            found[f"{role} {kind}"] = total / steps / max(1, len(processes))
    return found


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that are there, if more than half are; else None."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) * 2 > len(values) else None


# ---- results -----------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        model = next(
            (
                line.split(":", 1)[1].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ),
            model,
        )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        **gpu(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "sglang")},
    }


def gpu() -> dict[str, str]:
    """The GPU that a bench in this process may have used."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch and torch.cuda.is_available() else {}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a bench that needs no engine runs without SGLang too
        return "none"


def cell(value: object) -> str:
    """A value for people: numbers to three digits behind the point, None as a dash."""
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Rows as text under their column names."""
    lines = [list(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines
    )


def finish(
    options: argparse.Namespace,
    figures: Mapping[str, float | None],
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str],
) -> None:
    """Prints the table and the figures; writes --json."""
    facts = machine()
    print(table(rows, columns))
    print("\n" + "  ".join(f"{name} {cell(value)}" for name, value in figures.items()))
    print("  ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        text = json.dumps(
            {"figures": dict(figures), "rows": [dict(row) for row in rows], "machine": facts}, indent=1
        )
        temporary = options.json.with_name(f".{options.json.name}.{os.getpid()}")
        temporary.write_text(text + "\n")
        temporary.replace(options.json)


def whole(
    trajectory_id: int, group_id: int, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
) -> "Whole":
    """A trajectory made up: its record, its prompt and its response, of one policy and all of it trained."""
    from laminar_hpc.line.messages.data import Trajectory, VersionSpan
    from laminar_hpc.store.payload.layout import Response, drawn, logprobs_array, tokens_array
    from laminar_hpc.store.payload.whole import Whole

    n = len(tokens)
    spans, columns = [VersionSpan(0, 0, n)], (tokens_array(tokens), logprobs_array(logprobs))
    response = Response(trajectory_id, 0, *columns, spans, drawn(n, spans))
    record = Trajectory(trajectory_id, group_id, 0, 0, 0, 0, n, n, 1, "stop", 1.0, 2.0, step_finished=0)
    return Whole(record, tokens_array(prompt), response)
