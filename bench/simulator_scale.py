"""How the simulator's cost grows with trainer groups, for bench/simulator.py: CPU seconds and memory
of a process for each size."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from simulator_papers import row

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.groups import exchange_seconds, simulate_groups
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import setup
from laminar_hpc.simulator.tables import GPUS, MODELS

GROUP = 4096  # GPUs
STEPS = 3
GROUPS = (1, 7, 49)  # 4,096 to 200,704 GPUs
_GIB = 2**30
MEMORY_MAX, SECONDS_MAX = 4.0, 600.0  # GiB and CPU seconds of the largest


def measured(groups: int) -> dict[str, float]:
    """One run of 32B in this process: half of the GPUs train, each group 8,192 trajectories per step."""
    gpu, model = GPUS["H800"], MODELS["32B"]
    made = setup(
        PIPELINES["laminar"],
        model,
        gpu,
        GROUP // 2,
        [(gpu, GROUP // 2, model.tensor_parallel, None)],
        WorkloadConfig(),
        DEFAULT,
        steps=STEPS,
        warmup_steps=1,
    )
    start = time.process_time()
    figures = simulate_groups(made, groups, exchange_seconds(model, groups, DEFAULT)).figures
    return {
        "seconds": time.process_time() - start,
        "gib": _peak_bytes() / _GIB,
        "finished": figures["finished_trajectories"],
        "tokens_per_second": figures["tokens_per_second"],
    }


def _peak_bytes() -> int:
    """Of this process's memory. (ru_maxrss begins with that of the process which started it.)"""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


def scale(rows: list[dict]) -> dict[str, float]:
    """Per size: CPU seconds, memory, microseconds for each trajectory."""
    found = {}
    for groups in GROUPS:
        done = subprocess.run(
            [sys.executable, __file__, str(groups)], stdout=subprocess.PIPE, check=True, text=True
        )
        one = found[groups] = json.loads(done.stdout)
        note = (
            f"{one['finished']:,.0f} trajectories, {one['seconds'] / one['finished'] * 1e6:.0f} us each; "
            f"{one['tokens_per_second']:,.0f} tokens/s"
        )
        what, last = f"{groups} x {GROUP:,} GPUs, {STEPS} steps", groups == GROUPS[-1]
        rows.append(row("scale", f"{what}: CPU s", SECONDS_MAX if last else None, one["seconds"], note))
        rows.append(row("scale", f"{what}: GiB", MEMORY_MAX if last else None, one["gib"]))
    first, largest = found[GROUPS[0]], found[GROUPS[-1]]
    return {
        "scale_seconds": largest["seconds"],
        "scale_gib": largest["gib"],
        "scale_cost_over_linear": largest["seconds"] / first["seconds"] / GROUPS[-1],
    }


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]))))
