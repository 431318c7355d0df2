"""An emulated run whose number of replicas is fixed, or follows what the run measures, and what it costs:
used by anywhere.py. Each replica is a process of its own; the run starts them by cluster.scale_command."""

import stat
import time
from pathlib import Path

import common  # noqa: F401 (where helpers are)

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.line.messages.membership import UNNUMBERED
from laminar_hpc.machine.files import jsonl

FEWEST, MOST = 2, 6
TRAIN_SECONDS = 4.4e-4  # emulated, of a token
_LOOK_SECONDS = 0.05
_LIMIT_SECONDS = 900.0


def scaled_run(folder: Path, replicas: int | str, steps: int) -> dict[str, object]:
    """From the first step to the last: tokens per second, and replicas per trainer's second, a starting one
    included; with what was predicted of the changes and what was measured."""
    config = prepare(folder, 4_000, 50, 1024)
    config.steps, config.rollout.replicas = steps, replicas
    config.rollout.max_concurrent, config.rollout.kv_cache_tokens = 4, 100_000
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 8, 4
    config.emulation.time_scale, config.emulation.model = 8.0, "7B"
    config.emulation.median_response_tokens, config.emulation.sigma = 200.0, 0.3
    config.pipeline.max_staleness, config.rollout.increment_tokens = 2, 0
    run_dir, asked = Path(config.run_dir), folder / "asked"
    asked.touch()
    if config.rollout.scales:
        program = folder / "scale"
        program.write_text(f'#!/bin/sh\n[ "$1" = list ] || echo "$1 $2" >> {asked}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        config.cluster.scale_command = str(program)
    emulation, heard, alive = Emulation(config, TRAIN_SECONDS, per_process=1), 0, list[tuple[float, int]]()
    try:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while emulation.controller.poll() is None and time.monotonic() < deadline:
            lines = asked.read_text().splitlines()
            for action, number in (line.split() for line in lines[heard:]):
                for _ in range(int(number) if action == "start" else 0):
                    emulation.fleets[1000 + len(emulation.fleets)] = emulation.fleet(UNNUMBERED, 1)
            heard = len(lines)
            alive.append((time.time(), sum(each.poll() is None for each in emulation.fleets.values())))
            time.sleep(_LOOK_SECONDS)
    finally:
        emulation.stop()
    if emulation.controller.returncode != 0:
        raise SystemExit(f"the run of {replicas} replicas ended with {emulation.controller.returncode}")
    return _figures(run_dir, replicas, alive)


def _figures(run_dir: Path, replicas: int | str, alive: list[tuple[float, int]]) -> dict[str, object]:
    first, *others = jsonl.read(run_dir / "metrics.jsonl", "step")
    seconds = others[-1]["time"] - first["time"]
    counts = [count for at, count in alive if first["time"] <= at <= others[-1]["time"]]
    return {
        "replicas": str(replicas),
        "tokens_per_second": sum(step["response_tokens"] for step in others) / seconds,
        "mean_replicas": sum(counts) / len(counts),
        "wait_share": sum(step["wait_seconds"] for step in others) / seconds,
        "changes": [
            {name: each[name] for name in ("before", "replicas", "predicted_gain", "measured_gain")}
            for each in jsonl.read(run_dir / "metrics.jsonl", "scaled")
        ],
    }
