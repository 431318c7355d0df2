"""LoRA by GRPO: the shipped example here and by TRL's GRPOTrainer with PEFT, from the same model, prompts,
reward, group and batch size, rank, clip and Adam, each on one core of its own at the same time.

    python bench/lora_peers.py --json lora_peers.json     one pair at each of three learning rates
    python bench/lora_peers.py --trl-python VENV/bin/python --repeats 3 --learning-rates 1e-3

`reached`: seconds and CPU seconds from the first request, and trajectories, until the accuracy of the
batches, over 3 steps, is 0.70; `whole`: the same from the start of the command. The two swap cores with each
pair. `others`: the share of the core that other processes had meanwhile; where it is above 0.1 the wall
seconds say little, and the CPU seconds stand.

Figures: `cpu_over_trl`, `seconds_over_trl`, `trajectories_over_trl`: ours over theirs, each with the learning
rate at which it takes the fewest CPU seconds, medians over repeats. Nothing is held against them.
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

import common
import psutil

from laminar_hpc.config.load import load_config
from laminar_hpc.report import rundata, summary

SPOILED = 0.1
RATES = "5e-4,1e-3,2e-3"
COLUMNS = (
    "library",
    "lr",
    "repeat",
    "reached s",
    "reached CPU s",
    "trajectories",
    "whole s",
    "whole CPU s",
    "others",
    "wall",
)


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

    def row(self, first: float, goal: float | None, trajectories: int | None) -> dict:
        """`first`: when the first request was made; `goal`: when the goal was reached."""
        if goal is None:
            return {}
        start, now = self.at(first), self.at(goal)
        busy, own = now[2] - self.course[0][2], now[1]
        others = max(0.0, busy - own) / (goal - self.began)
        return {
            "reached s": goal - first,
            "reached CPU s": now[1] - start[1],
            "trajectories": trajectories,
            "whole s": goal - self.began,
            "whole CPU s": now[1],
            "others": others,
            "wall": "spoiled by load" if others > SPOILED else "",
        }


def log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def begin_ours(options: argparse.Namespace, run_dir: Path, lr: float, seed: int, core: int) -> Watch:
    words = [f"run_dir={run_dir}", f"optimizer.lr={lr}", f"seed={seed}", f"steps={options.steps}"]
    command = ["-m", "laminar_hpc.launch.cli", "train", "experiment=lora", "evaluation.files=[]", *words]
    return Watch([sys.executable, *command, *options.overrides], core, log_of(run_dir))


def ours(watch: Watch, run_dir: Path) -> dict:
    run = rundata.load(run_dir)
    seconds = common.seconds_to_accuracy(run)
    first = min(s.t0 for spans in run.spans.values() for s in spans if s.kind == "generate")
    goal = None if seconds is None else first + seconds
    return watch.row(first, goal, summary.trajectories_to_goal(run.steps, summary.GOAL))


def begin_trl(options: argparse.Namespace, folder: Path, lr: float, seed: int, core: int) -> Watch:
    config = load_config(["experiment=lora"])
    a, lora = config.algorithm, config.model.lora
    folder.mkdir()
    settings = {
        "model": str(config.model.path),
        "data": str(config.data.train),
        "prompts": a.prompts_per_step,
        "samples": a.samples_per_prompt,
        "minibatches": a.minibatches_per_step,
        "max_tokens": config.sampling.max_response_tokens,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "lr": lr,
        "seed": seed,
        "steps": options.steps,
        "goal": summary.GOAL,
        "goal_steps": summary.GOAL_STEPS,
        "folder": str(folder),
        "log": str(folder / "course.jsonl"),
    }
    worker = str(Path(__file__).with_name("trl_lora.py"))
    return Watch([options.trl_python, worker, json.dumps(settings)], core, log_of(folder))


def trl(watch: Watch, folder: Path) -> dict:
    first, *batches = map(json.loads, (folder / "course.jsonl").read_text().splitlines())
    recent = [batch["accuracy"] for batch in batches[-summary.GOAL_STEPS :]]
    reached = sum(recent) / max(1, len(recent)) >= summary.GOAL
    size = load_config(["experiment=lora"]).algorithm
    trajectories = len(batches) * size.prompts_per_step * size.samples_per_prompt
    return watch.row(first["time"], batches[-1]["time"] if reached else None, trajectories)


SIDES: dict[str, tuple[Callable, Callable]] = {"laminar": (begin_ours, ours), "trl": (begin_trl, trl)}


def pair(options: argparse.Namespace, folder: Path, lr: float, repeat: int, turn: int) -> list[dict]:
    """One run of each, side by side."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the two run side by side, and this process may use one core only")
    watches, rows, places = {}, [], {}
    try:
        for number, (name, (begin, _)) in enumerate(SIDES.items()):
            places[name] = folder / f"{name}-{lr:g}-{repeat}"
            watches[name] = begin(options, places[name], lr, repeat, cores[(number + turn) % 2])
        end = time.time() + options.run_seconds
        for name, watch in watches.items():
            watch.process.wait(max(1.0, end - time.time()))
            watch.join()
            if watch.process.returncode:
                said = log_of(places[name]).read_text(errors="replace").splitlines()[-15:]
                raise SystemExit(f"{name} failed; it said last:\n" + "\n".join(said))
            rows.append({"library": name, "lr": lr, "repeat": repeat, **SIDES[name][1](watch, places[name])})
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{name} had not ended after {options.run_seconds:.0f} s") from None
    finally:
        for watch in watches.values():
            common.end(watch.process)
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
            of_rates.append({"lr": lr, **{k: common.median([row.get(k) for row in mine]) for k in keys}})
        return min(of_rates, key=lambda of: of["reached CPU s"] or float("inf"))

    def ratio(key: str) -> float | None:
        mine, theirs = best("laminar")[key], best("trl")[key]
        return mine / theirs if mine and theirs else None

    figures = {
        "cpu_over_trl": ratio("reached CPU s"),
        "seconds_over_trl": ratio("reached s"),
        "trajectories_over_trl": ratio("trajectories"),
        "lr": best("laminar")["lr"],
        "trl_lr": best("trl")["lr"],
    }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
