"""What the system itself costs: rollout and trainer of a live run against their bare parts on the same work.

    python bench/tax.py --json tax.json                 3 repeats of 12 steps: 15 minutes on two cores
    python bench/tax.py --repeats 1 --steps 6

A live run of the example first, its processes on the cores of --cores; then the same work on the same cores:
SGLang's server driven directly (the same prompts, as many tokens of each response, a local batch at once),
and beside it the trainer's step on each batch without anything around it. Both go on until both have been
measured, since a core gives a process less while its neighbour works. A repeat is one of each.

The live window begins behind step SKIP, as compilation and first batches are not the system's, and ends
before the last step, behind which processes end. The bare parts warm up on the steps before the window and
are measured on the window's, under their numbers and seeds: the trainer makes the same updates from the same
weights, or the bench fails because its gradients have other norms, and the engine has seen none of the
prompts. Waits for data are in no share: they take no CPU, and the time of the wall shares is that of work.

Shares are bare over live: in CPU seconds per token of all processes of a role (of the rollout the worker, the
engine and the rewards), which other work on the machine changes less; and as `wall` in tokens per second of
the time in which the role was at work, which it spoils. `main thread` is of the live trainer's CPU seconds
what its main thread takes, which trains: the rest publishes, talks and polls. It needs no second
measurement, so it shows changes that are smaller than the spread of the shares. The controller's CPU seconds
are per 1,000 trajectories.

Figures: `engine_share` and `trainer_share`, medians of the CPU shares, each with a goal of 0.95; `..._wall`;
`trainer_main_thread`; `controller_seconds_per_1000`.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import common
import psutil

from laminar_hpc.config.load import read_config
from laminar_hpc.engine.interface import sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.machine.roles import assign_roles
from laminar_hpc.report import rundata
from laminar_hpc.report.idle import busy, overlap
from laminar_hpc.report.rundata import Run
from laminar_hpc.store.payload.whole import Whole

SKIP = 2  # steps
PARTS = ("engine", "trainer")
STEPS = 12
ROLES = assign_roles(1, 1, 1, 4)  # by rank
COLUMNS = (
    *("repeat", "part", "ms of CPU per 1,000 tokens: live", "bare", "share", "wall share"),
    *("main thread", "per 1000", "load"),
)
MAIN = "trainer's main thread"
Seconds = dict[str, float]  # CPU seconds by role, and of MAIN


def cpu_of(process: psutil.Process) -> float:
    """Of a process and its descendants, those that have ended included."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:4]) for each in family)


class Watch(threading.Thread):
    """CPU seconds by role at the end of each step of a run of so many, between SKIP and the last."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        super().__init__(daemon=True)
        self.run_dir = run_dir
        self.steps = steps
        self.ended = threading.Event()
        self.seen: dict[int, Seconds] = {}
        self.processes: dict[str, psutil.Process] = {}

    def run(self) -> None:
        while not self.ended.wait(0.1):
            path = self.run_dir / "metrics.jsonl"
            lines = jsonl.read(path) if path.exists() else []
            steps = [line["step"] for line in lines if line["kind"] == "step"]
            if steps and len(self.processes) < len(ROLES):  # a look for them takes longer than one at them
                self.processes = self.ranks()
            if steps and SKIP <= steps[-1] < self.steps and steps[-1] not in self.seen:
                with contextlib.suppress(psutil.NoSuchProcess):  # a child has just ended: soon again
                    self.seen[steps[-1]] = self.roles()

    def roles(self) -> Seconds:
        found = {role: cpu_of(process) for role, process in self.processes.items()}
        trainer = self.processes["trainer"]
        own = next(each for each in trainer.threads() if each.id == trainer.pid)
        return found | {MAIN: own.user_time + own.system_time}

    def ranks(self) -> dict[str, psutil.Process]:
        """The process of each role."""
        found = dict[str, psutil.Process]()
        for process in psutil.process_iter():
            try:
                here = f"run_dir={self.run_dir}" in process.cmdline()
                rank = process.environ().get("RANK") if here else None
                parent = process.parent()
                if rank is not None and (parent is None or "RANK" not in parent.environ()):
                    found[ROLES[int(rank)].role] = process
            except psutil.Error:  # it has ended meanwhile, or is not ours
                continue
        return found


def live(options: argparse.Namespace, folder: Path, repeat: int) -> tuple[Run, Seconds, int, int]:
    """A run, the CPU seconds of its window by role, and the window's first and last step."""
    name = f"live-{repeat}"
    watch = Watch(folder / name, options.steps)
    watch.start()
    try:
        run = common.train(options, folder, name, {"seed": repeat, "evaluation.files": "[]"})
    finally:
        watch.ended.set()
        watch.join()
    steps = sorted(watch.seen)
    if len(steps) < 2:
        raise SystemExit(f"{name} was too short to be watched: give it more --steps")
    first, last = watch.seen[steps[0]], watch.seen[steps[-1]]
    return run, {role: last[role] - first[role] for role in last}, steps[0], steps[-1]


def batches_of(run: Run, last: int) -> list[list[Whole]]:
    """What the steps up to `last` have trained."""
    by_step = [[t.id for t in run.consumed if t.consumed_step == step] for step in range(last)]
    return [sorted(run.wholes(ids), key=lambda whole: whole.record.group_id) for ids in by_step]


# ---- bare parts --------------------------------------------------------------------------------------------


def passes(cpu: Callable[[], float]) -> Iterator[int]:
    """In a process of its own: pass 0 warms up; 1 is measured, once the parent says so, and printed; then
    others while the other part is measured."""
    yield 0
    print("ready", flush=True)
    sys.stdin.readline()
    spent, begun = cpu(), time.perf_counter()
    yield 1
    print(json.dumps([cpu() - spent, time.perf_counter() - begun]), flush=True)
    number = 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        yield (number := number + 1)


class Work:
    """Of a run's steps `first` to `last`; of a pass: number and batch of each step."""

    def __init__(self, run_dir: Path, first: int, last: int) -> None:
        self.config = read_config(run_dir / "config.yaml")
        self._first, run = first, rundata.load(run_dir)
        self._batches = batches_of(run, last)
        self.norms = {step["step"] - 1: step["grad_norm"] for step in run.steps}

    def of(self, number: int) -> list[tuple[int, list[Whole]]]:
        """Pass 0 has the steps before the window."""
        steps = list(enumerate(self._batches))
        return steps[self._first :] if number else steps[: self._first]


def trainer_alone(work: Work) -> None:
    """The trainer's step on each batch."""
    import torch
    import torch.distributed as dist

    import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.step.batch import in_memory
    from laminar_hpc.trainer.step.learner import Learner

    torch.set_num_threads(work.config.trainer.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    learner = Learner(work.config, MegatronPolicy(work.config))
    for number in passes(time.process_time):
        for step, batch in work.of(number):
            norm = learner.train(in_memory(batch), step, lambda: None)["grad_norm"]
            if number < 2 and not math.isclose(norm, work.norms[step], rel_tol=1e-3):
                raise SystemExit(f"step {step} was other work: {norm=}, live {work.norms[step]}")


async def engine_alone(work: Work, folder: Path) -> None:
    """Generates each batch anew; CPU seconds are those of server and driver."""
    server, me, config = SglangServer(work.config, 0, folder), psutil.Process(), work.config
    try:
        await server.start(Path(config.model.path), 0, seed=1)

        async def one(whole: Whole, name: str) -> None:
            drawn = sampling_parameters(config.sampling, 1.0, whole.record.length, [])
            await server.generate(whole.prompt.tolist(), drawn | {"ignore_eos": True}, name, name)

        async def all_of(batch: list[Whole], name: str) -> None:
            await asyncio.gather(*(one(w, f"{name}-{w.record.trajectory_id}") for w in batch))

        for number in passes(lambda: cpu_of(me)):
            for step, batch in work.of(number):
                await all_of(batch, f"{number}-{step}")
    finally:
        await server.stop()


def side_by_side(
    options: argparse.Namespace, run_dir: Path, first: int, last: int
) -> dict[str, tuple[float, float]]:
    """(CPU seconds, seconds) of each bare part on the work of these steps."""
    words = [str(run_dir), str(first), str(last)]
    with ExitStack() as stack:
        parts = {}
        for part in PARTS:
            command = [sys.executable, __file__, "--child", part, *words]
            parts[part] = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(parts[part].kill)
        too_long = threading.Timer(options.run_seconds, lambda: [each.kill() for each in parts.values()])
        too_long.start()
        stack.callback(too_long.cancel)

        def said(part: str, start: str) -> str:
            for line in parts[part].stdout:
                if line.startswith(start):
                    return line
            raise SystemExit(f"the bare {part} ended before it was measured")

        for part in PARTS:
            said(part, "ready")
        for each in parts.values():
            print("go", file=each.stdin, flush=True)
        found = {part: tuple(json.loads(said(part, "["))) for part in PARTS}
        for each in parts.values():
            each.stdin.close()
        for each in parts.values():
            each.wait()
        return found


def child(what: str, run_dir: Path, first: int, last: int) -> None:
    die_with_parent()
    work = Work(run_dir, first, last)
    if what == "trainer":
        trainer_alone(work)
    else:
        asyncio.run(engine_alone(work, run_dir))


# ---- together ----------------------------------------------------------------------------------------------


def repeat_of(options: argparse.Namespace, folder: Path, repeat: int) -> list[dict]:
    run, spent, first, last = live(options, folder, repeat)
    steps = [step for step in run.steps if first < step["step"] <= last]
    responses = sum(step["response_tokens"] for step in steps)
    whole = responses + sum(step["prompt_tokens"] for step in steps)
    times = {step["step"]: step["time"] for step in run.steps}
    window = [(times[first], times[last])]
    bare, rows = side_by_side(options, run.directory, first, last), []
    for part, role, kinds, tokens in (
        ("engine", "rollout", ("generate",), responses),
        ("trainer", "trainer", ("train",), whole),
    ):
        cpu, seconds = bare[part]
        at_work = overlap(busy(run.spans[f"{role}0"], kinds), window)
        rows.append(
            {
                "repeat": repeat,
                "part": part,
                COLUMNS[2]: spent[role] / tokens * 1e6,
                "bare": cpu / tokens * 1e6,
                "share": cpu / spent[role],
                "wall share": seconds / at_work,
                "main thread": spent[MAIN] / spent[role] if part == "trainer" else None,
                "load": os.getloadavg()[0],
            }
        )
    trained = sum(step["trajectories"] for step in steps)
    rows.append({"repeat": repeat, "part": "controller", "per 1000": spent["controller"] / trained * 1000})
    return rows


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--cores", type=common.words(int), help="of all processes, as 0,1 (default: all)")
    options.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.child:
        what, run_dir, first, last = options.child
        child(what, Path(run_dir), int(first), int(last))
        return
    options.steps = options.steps or STEPS
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores})
    rows = []
    with common.run_folder(options) as folder:
        for repeat in range(options.repeats):
            rows += (found := repeat_of(options, folder, repeat))
            print(common.table(found, COLUMNS), file=sys.stderr, flush=True)

    def middle(part: str, key: str) -> float | None:
        return common.median([row.get(key) for row in rows if row["part"] == part])

    figures = {
        "engine_share": middle("engine", "share"),
        "trainer_share": middle("trainer", "share"),
        "engine_share_wall": middle("engine", "wall share"),
        "trainer_share_wall": middle("trainer", "wall share"),
        "trainer_main_thread": middle("trainer", "main thread"),
        "controller_seconds_per_1000": middle("controller", "per 1000"),
    }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
