"""Figures of bench/anywhere.py on a run whose only rollout is far away: behind 50 Mbit/s, 80 ms and 1% loss
(wide_area.py; root).

`rate_over_local` (goal: at least 0.9): the trainer's steps per second in the shipped example with its rollout
behind that line, over those with the same rollout beside the trainer. Median of pairs of runs, one after the
other; each rollout is on a machine of its own (host name, shared memory), and the run directory is shared.

`rate_of_bound`: the far run's rate over what the line and the staleness bound b allow, by what the local run
of its pair measured, with local batches of m steps:

    seconds per step >= max(local + R / m, (m local + trained + bytes / B + 2 R) / (b + 2 - m))

R is the round trip and B the bandwidth. A replica that has drained asks for work, and waits R. The last
groups of a local batch need weights at most b steps older than their own step; after these were trained come
their publication, the grant, the generation (at most `local` a step), the last response's way and training.
A replica that asks for work before it has drained (rollout/asking.py) waits less than R, and may be faster.

In the rows, of both runs: `idle`, seconds that the replica waits for work per local batch; `late`, from the
relay beside the trainer to that beside the rollout, of a publication; `line`, CPU seconds per step of the
process that makes the line, which the cores lack for the run.

--control is TCP's congestion control on the line (default cubic); key=value are settings of both runs.
"""

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, TextIO

import common
import psutil
import wide_area

from laminar_hpc.config.load import read_config
from laminar_hpc.machine.observability.trace import read_spans

MBIT, MILLISECONDS, LOSS = 50, 80, 0.01
_MACHINE = "unshare --mount --uts --pid --fork --kill-child --mount-proc bash -c".split()
_ALONE = "hostname elsewhere && mount -t tmpfs none /dev/shm && "
_WARM_UP = 3  # steps that are not counted


class _Measured(NamedTuple):
    """Of a run; seconds are means per step, per local batch and per publication."""

    step: float
    trained: float
    idle: float
    late: float
    line: float
    wire_bytes: float
    staleness: int
    batch: float  # steps for which a local batch has prompts

    @property
    def bound(self) -> float:
        """Seconds per step that its far counterpart takes at least."""
        trip, crossing = MILLISECONDS / 1000, self.wire_bytes / (MBIT * 1e6 / 8)
        cycle = self.batch * self.step + self.trained + crossing + 2 * trip
        return max(self.step + trip / self.batch, cycle / (self.staleness + 2 - self.batch))


def rate_over_local(chosen: argparse.Namespace) -> tuple[dict, list[dict]]:
    """`chosen.repeats` pairs of runs of `chosen.run_steps` steps."""
    if why := wide_area.missing():
        print(f"  no wide area here: {why}", file=sys.stderr)
        return {}, []
    rows = []
    for number in range(chosen.repeats):
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            here, far = (
                _measured(Path(folder) / name, place, chosen)
                for name, place in (("here", ""), ("far", "elsewhere"))
            )
        row = {"pair": number, "far over here": here.step / far.step, "of bound": here.bound / far.step}
        for where, each in (("here", here), ("far", far)):
            row |= {f"{name} {where}": getattr(each, name) for name in ("step", "idle", "late", "line")}
        rows.append(row)
        print(f"  {here.step:.2f} s per step here, {far.step:.2f} far", file=sys.stderr, flush=True)
    return {
        "rate_over_local": statistics.median(row["far over here"] for row in rows),
        "rate_of_bound": statistics.median(row["of bound"] for row in rows),
    }, rows


def _measured(run_dir: Path, place: str, chosen: argparse.Namespace) -> _Measured:
    """A run whose rollout is at `place`, or beside the trainer's machine."""
    run_dir.mkdir()
    steps = chosen.run_steps
    with (
        wide_area.WideArea(MBIT, MILLISECONDS, LOSS, chosen.control) as line,
        open(run_dir / "out", "w") as out,
    ):
        words = ["experiment=demo", f"steps={steps}", "evaluation.files=[]", "guard.enabled=false"]
        words += [f"cluster.host={line.address(0)}", "sampling.max_response_tokens=48", *chosen.overrides]
        far = [*words, *([f"cluster.place={place}"] if place else [])]
        relay = shlex.join(["launch/relay.sh", str(run_dir), *far, "first_index=1"])
        rollout = shlex.join(["launch/rollout.sh", str(run_dir), *far])
        start = functools.partial(_start, line, out)
        processes = [start(0, ["launch/all_roles.sh", str(run_dir), *words])]
        try:
            while not (run_dir / "controller.json").exists() and processes[0].poll() is None:
                time.sleep(0.1)
            elsewhere = [*_MACHINE, f"{_ALONE}({relay} & {rollout} & wait)"]
            processes.append(start(1 if place else 0, elsewhere))
            if processes[0].wait(common.STOP_SECONDS * steps) != 0:
                raise SystemExit(f"anywhere: error: {(run_dir / 'out').read_text()}")
            line_seconds = sum(psutil.Process(line.pid).cpu_times()[:2]) / steps
        finally:
            for process in processes:
                process.terminate()
                process.wait(60)
    return _read(run_dir, line_seconds)


def _read(run_dir: Path, line_seconds: float) -> _Measured:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["kind"] == "step"][_WARM_UP:]
    begun, ended = steps[0]["time"], steps[-1]["time"]
    spans = read_spans(run_dir)["rollout0"]
    idle = [s.t1 - s.t0 for s in spans if s.fields.get("what") == "work" and begun < s.t0 and s.t1 < ended]
    batches = sum(s.kind == "generate" and begun < s.t0 < ended for s in spans)
    here, there = (
        {each["weight_id"]: each for each in records if (each["kind"], each.get("index")) == ("relay", index)}
        for index in (0, 1)
    )
    late = [there[i]["time"] - here[i]["time"] for i in here.keys() & there.keys()]
    bytes_of = [each.get("wire_bytes", each["bytes"]) for each in there.values()]
    config = read_config(run_dir / "config.yaml")
    prompts, bound = config.algorithm.prompts_per_step, config.pipeline.staleness_max
    assert bound is not None, "a run without a bound waits for no weights"
    return _Measured(
        step=(ended - begun) / (len(steps) - 1),
        trained=statistics.fmean(each["train_seconds"] for each in steps),
        idle=sum(idle) / max(1, batches),
        late=statistics.fmean(late),
        line=line_seconds,
        wire_bytes=statistics.fmean(bytes_of),
        staleness=bound,
        batch=(config.pipeline.local_batch_groups or prompts) / prompts,
    )


def _start(line: wide_area.WideArea, out: TextIO, host: int, command: list[str]) -> subprocess.Popen:
    """On that host of the line; the run itself has no rollout."""
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": wide_area.DEVICE}
    environment["ROLLOUTS"] = "0" if command[0] == "launch/all_roles.sh" else "1"
    return subprocess.Popen(
        ["ip", "netns", "exec", line.namespace(host), *command],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        cwd=common.ROOT,
        env={**os.environ, **environment},
    )
