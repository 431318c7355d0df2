"""LoRA by GRPO: the shipped example here and by TRL's GRPOTrainer with PEFT, from the same model, prompts,
reward, group and batch size, rank, clip and Adam, each on one core of its own at the same time.

    python bench/lora_peers.py --json lora_peers.json     one pair at each of three learning rates
    python bench/lora_peers.py --trl-python VENV/bin/python --repeats 3 --learning-rates 1e-3

A run ends when the accuracy of its batches, over 3 steps, is 0.70, or after `--steps` or `--run-seconds`.
`reached`: seconds and CPU seconds from the first request until then, a dash where it was not; `CPU s/1000`:
of a thousand trajectories that were drawn and trained, over the whole run. Start-up is in none of them. The
two swap cores with each pair. `others`: the share of the core that other processes had meanwhile; above 0.1
the wall seconds say little, and the CPU seconds stand.

Figures, ours over theirs: `cpu_over_trl`, `seconds_over_trl` and `trajectories_over_trl` until the goal, each
with the learning rate at which it takes the fewest CPU seconds; `cpu_per_trajectory_over_trl`, of all runs.
Medians over repeats. Nothing is held against them.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import common
import psutil

from laminar_hpc.config.load import load_config
from laminar_hpc.report import rundata, summary

SPOILED = 0.1
COURSE = "course.jsonl"  # of trl_lora.py
RATES = "5e-4,1e-3,2e-3"
SIZE = load_config(["experiment=lora"])
TRAJECTORIES = SIZE.algorithm.prompts_per_step * SIZE.algorithm.samples_per_prompt  # of a batch
COLUMNS = (
    "library",
    "lr",
    "repeat",
    "reached s",
    "reached CPU s",
    "trajectories",
    "accuracy",
    "CPU s/1000",
    "others",
    "wall",
)
Batch = tuple[float, float]  # when its last update was made, and its accuracy


class Watch(threading.Thread):
    """Of a process and all that it starts: CPU seconds over time, and what its core did for others."""

    def __init__(self, command: list[str], core: int, log: Path) -> None:
        super().__init__(daemon=True)
        self.core = core
        self.began = time.time()
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                ["taskset", "-c", str(core), *command],
                cwd=common.ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._of_process: dict[tuple[int, float], float] = {}
        self.course: list[tuple[float, float, float]] = [(self.began, 0.0, self._busy())]
        self.start()

    def _busy(self) -> float:
        of_core = psutil.cpu_times(percpu=True)[self.core]
        return sum(of_core) - of_core.idle - of_core.iowait

    def run(self) -> None:
        while self.process.poll() is None:
            self.look()
            time.sleep(1.0)

    def look(self) -> None:
        """Notes the time, the CPU seconds until now, and those of the core."""
        try:
            everyone = psutil.Process(self.process.pid)
            for process in [everyone, *everyone.children(recursive=True)]:
                times = process.cpu_times()
                self._of_process[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            pass  # the next look has the others
        self.course.append((time.time(), sum(self._of_process.values()), self._busy()))

    def at(self, when: float) -> tuple[float, float, float]:
        """The last look before."""
        return max((look for look in self.course if look[0] <= when), default=self.course[0])

    def row(self, first: float, batches: list[Batch]) -> dict:
        """`first`: when the first request was made."""
        start, now = self.at(first), self.at(batches[-1][0])
        wall, cpu, trajectories = now[0] - start[0], now[1] - start[1], len(batches) * TRAJECTORIES
        others = max(0.0, now[2] - start[2] - cpu) / max(1.0, wall)
        reached = {"reached s": batches[-1][0] - first, "reached CPU s": cpu} if at_goal(batches) else {}
        return {
            **reached,
            "trajectories": trajectories,
            "accuracy": recent(batches),
            "CPU s/1000": cpu / trajectories * 1000,
            "others": others,
            "wall": "spoiled by load" if others > SPOILED else "",
        }


def recent(batches: list[Batch]) -> float:
    """The mean accuracy of the last steps."""
    last = [accuracy for _, accuracy in batches[-summary.GOAL_STEPS :]]
    return sum(last) / max(1, len(last))


def at_goal(batches: list[Batch]) -> bool:
    return len(batches) >= summary.GOAL_STEPS and recent(batches) >= summary.GOAL


def lines(file: Path) -> list[dict]:
    """Those that are whole."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def begin_ours(options: argparse.Namespace, run_dir: Path, lr: float, seed: int, core: int) -> Watch:
    words = [f"run_dir={run_dir}", f"optimizer.lr={lr}", f"seed={seed}", f"steps={options.steps}"]
    command = ["-m", "laminar_hpc.launch.cli", "train", "experiment=lora", "evaluation.files=[]", *words]
    return Watch([sys.executable, *command, *options.overrides], core, log_of(run_dir))


def batches_of_ours(run_dir: Path) -> list[Batch]:
    records = lines(run_dir / "metrics.jsonl")
    return [(of["time"], of["accuracy_mean"]) for of in records if of["kind"] == "step"]


def first_of_ours(run_dir: Path) -> float:
    run = rundata.load(run_dir)
    return min(s.t0 for spans in run.spans.values() for s in spans if s.kind == "generate")


def begin_trl(options: argparse.Namespace, folder: Path, lr: float, seed: int, core: int) -> Watch:
    a, lora = SIZE.algorithm, SIZE.model.lora
    folder.mkdir()
    settings = {
        "model": str(SIZE.model.path),
        "data": str(SIZE.data.train),
        "prompts": a.prompts_per_step,
        "samples": a.samples_per_prompt,
        "minibatches": a.minibatches_per_step,
        "max_tokens": SIZE.sampling.max_response_tokens,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "lr": lr,
        "seed": seed,
        "steps": options.steps,
        "folder": str(folder),
        "log": str(folder / COURSE),
    }
    worker = str(Path(__file__).with_name("trl_lora.py"))
    return Watch([options.trl_python, worker, json.dumps(settings)], core, log_of(folder))


def batches_of_trl(folder: Path) -> list[Batch]:
    return [(line["time"], line["accuracy"]) for line in lines(folder / COURSE)[1:]]


def first_of_trl(folder: Path) -> float:
    return lines(folder / COURSE)[0]["time"]


class Side(NamedTuple):
    begin: Callable[[argparse.Namespace, Path, float, int, int], Watch]
    batches: Callable[[Path], list[Batch]]
    first: Callable[[Path], float]


SIDES = {
    "laminar": Side(begin_ours, batches_of_ours, first_of_ours),
    "trl": Side(begin_trl, batches_of_trl, first_of_trl),
}


def pair(options: argparse.Namespace, folder: Path, lr: float, repeat: int, turn: int) -> list[dict]:
    """One run of each, side by side."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the two run side by side, and this process may use one core only")
    places = {name: folder / f"{name}-{lr:g}-{repeat}" for name in SIDES}
    watches: dict[str, Watch] = {}
    try:
        for number, (name, side) in enumerate(SIDES.items()):
            watches[name] = side.begin(options, places[name], lr, repeat, cores[(number + turn) % 2])
        end = time.time() + options.run_seconds
        running = dict(watches)
        while running and time.time() < end:
            time.sleep(1.0)
            for name, watch in list(running.items()):
                if watch.process.poll() not in (None, 0):
                    said = log_of(places[name]).read_text(errors="replace").splitlines()[-15:]
                    raise SystemExit(f"{name} failed; it said last:\n" + "\n".join(said))
                if watch.process.poll() == 0 or at_goal(SIDES[name].batches(places[name])):
                    common.end(running.pop(name).process)
    finally:
        for watch in watches.values():
            common.end(watch.process)
            watch.join()
    rows = []
    for name, side in SIDES.items():
        row = {"library": name, "lr": lr, "repeat": repeat}
        if batches := side.batches(places[name]):
            row |= watches[name].row(side.first(places[name]), batches)
        rows.append(row)
    return rows


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.set_defaults(repeats=1, steps=30)
    parser.add_argument(
        "--learning-rates",
        type=lambda text: [float(word) for word in text.split(",")],
        default=RATES,
        help=f"of both (default {RATES})",
    )
    parser.add_argument(
        "--trl-python",
        default=sys.executable,
        metavar="PATH",
        help="the Python that has trl and peft (default: this one, whose requirements/dev.txt has both)",
    )
    options = parser.parse_args()
    rows: list[dict] = []
    with common.run_folder(options) as folder:
        turn = 0
        for repeat in range(options.repeats):
            for lr in options.learning_rates:
                rows += pair(options, folder, lr, repeat, turn)
                turn += 1

    def best(library: str) -> dict[str, float | None]:
        of_rates = []
        for lr in options.learning_rates:
            mine = [row for row in rows if row["library"] == library and row["lr"] == lr]
            keys = ("reached CPU s", "reached s", "trajectories")
            reached = [row if "reached s" in row else {} for row in mine]
            of_rates.append({"lr": lr, **{k: common.median([row.get(k) for row in reached]) for k in keys}})
        return min(of_rates, key=lambda of: of["reached CPU s"] or float("inf"))

    def ratio(key: str) -> float | None:
        mine, theirs = best("laminar")[key], best("trl")[key]
        return mine / theirs if mine and theirs else None

    per = {
        library: common.median([row.get("CPU s/1000") for row in rows if row["library"] == library])
        for library in SIDES
    }
    figures = {
        "cpu_per_trajectory_over_trl": per["laminar"] / per["trl"] if all(per.values()) else None,
        "cpu_over_trl": ratio("reached CPU s"),
        "seconds_over_trl": ratio("reached s"),
        "trajectories_over_trl": ratio("trajectories"),
        "lr": best("laminar")["lr"],
        "trl_lr": best("trl")["lr"],
    }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
