"""Dynamic repack on 16 emulated replicas of Qwen2.5-32B, against the same run without it; and how long the
planner takes.

    python bench/repack.py --json repack.json     two runs of 3,600 emulated seconds at five times real time
    python bench/repack.py --emulated-seconds 1800 --scale 20     shorter, where there are cores to spare
    python bench/repack.py --only together --warm-up 1500     with the order of prompts

EMULATED: the engines (laminar_hpc/emulation) generate nothing. Real: controller, store, rollout workers,
sockets, messages, moves. Lengths and constants are those of docs/simulator.md, unchanged: log-normal lengths
of median 1,097, sigma 1.69, cap 30,720; decode by the roofline of 4 H800 per replica; 850,000 KV tokens per
replica; 40 GB/s between replicas, charged for every byte of KV (one in 10,000 really crosses a socket); 512 x
16 trajectories per step, 256 requests per replica, 64 GPUs that train, no bound on staleness, a look every 5
emulated seconds.

throughput_gain      response tokens of trajectories that end, per second, with pipeline.repack=auto over off;
                     goal >= 1.26
kv_use_*             mean share of the KV cache in use, by the replicas' own reports
mean_latency_ratio   of a trajectory from first to last token, with over without; goal <= 1.03
together_gain        the same of what is shipped, pipeline.repack=auto and dispatch=longest_first with a bound
                     of two steps, over the same bound without either; 1,024 prompts that come again, as alike
                     in all passes as in one; goal >= 1.30
planner_ms_1000      policies.repack.plan on 1,000 replicas, worst of 20; goal < 10
demo_auto_over_off   tokens/s in the simulator, answers as short as the demo's, auto over off: the least of
                     three seeds; goal >= 0.98
limit_gain           the same gain as sensitivity's of replicas that never drain, which generate with any
                     weights: more than any repack can bring
sensitivity          the same gain in the simulator, which runs the same policies, with each constant 20%
                     lower and higher
"""

import argparse
import dataclasses
import gc
import itertools
import math
import random
import sqlite3
import statistics
import sys
import time
from pathlib import Path

import common

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.policies.repack import EngineLimits, MoveCosts, ReplicaView, RequestView, plan
from laminar_hpc.report import rundata
from laminar_hpc.simulator.constants import DEFAULT, GROUP_CORRELATION, PROMPT_TOKENS
from laminar_hpc.simulator.published_layout import trainer_layout
from laminar_hpc.simulator.rules import PIPELINES, Rules
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import setup as simulated_setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import job_costs
from laminar_hpc.simulator.workload import capped_mean
from laminar_hpc.store import status

REPLICAS, GPUS_EACH, TRAINING_GPUS = 16, 4, 64
MEDIAN, SIGMA, CAP, KV_TOKENS, CONCURRENT = 1097.0, 1.69, 30720, 850_000, 256
STEPS = 400  # never reached: the run is cut off
WIRE_SHARE = 1e-4
OFF, AUTO = PIPELINES["laminar_unbounded_no_repack"], PIPELINES["laminar_unbounded"]
NEVER_DRAINED = dataclasses.replace(PIPELINES["versions"], max_staleness=50)
COLUMNS = (
    "what",
    "repack",
    "tokens/s",
    "KV use",
    "latency s",
    "latency max",
    "trajectories",
    "moves",
    "prefill tokens saved",
    "gain",
)
# Constants of the costs and the policy, for the sensitivity; names of simulator/constants.py but for the last
# three.
VARIED = (
    "decode_layer_seconds",
    "decode_kv_efficiency",
    "decode_hbm_efficiency",
    "decode_flops_efficiency",
    "prefill_mfu",
    "kv_move_bytes_per_second",
    "kv_move_latency",
    "pull_overhead",
    "repack_period",
    "repack_kv_share",
    "train_kernel_efficiency",
    "median",
    "sigma",
    "kv_tokens",
)


def emulate(options: argparse.Namespace, folder: Path, repack: str, dispatch: str = "") -> dict:
    """One run and its row. With `dispatch` prompts come again, and staleness is bounded."""
    folder.mkdir(parents=True)
    config = prepare(folder, 1024 if dispatch else 20_000, PROMPT_TOKENS, CAP)
    config.steps = STEPS
    config.rollout.replicas, config.rollout.kv_cache_tokens, config.rollout.max_concurrent = (
        REPLICAS,
        KV_TOKENS,
        CONCURRENT,
    )
    config.rollout.request_timeout_seconds = 3600.0
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 512, 16
    config.reward.slots = 256
    config.cluster.heartbeat_timeout_seconds = config.cluster.join_timeout_seconds = 120.0
    e, p = config.emulation, config.pipeline
    e.time_scale, e.median_response_tokens, e.sigma, e.wire_share = options.scale, MEDIAN, SIGMA, WIRE_SHARE
    p.max_staleness, p.repack, p.repack_seconds, p.repack_requests = (
        None,
        repack,
        DEFAULT.repack_period / options.scale,
        CONCURRENT,
    )
    if dispatch:
        p.dispatch, p.max_staleness, e.constants = dispatch, 2, {"prompt_correlation": GROUP_CORRELATION}
    layout = trainer_layout(
        MODELS["32B"], GPUS["H800"], TRAINING_GPUS, WorkloadConfig(max_response_tokens=CAP), DEFAULT
    )
    assert layout is not None
    job = job_costs(MODELS["32B"], GPUS["H800"], TRAINING_GPUS, layout, REPLICAS * GPUS_EACH, CAP, DEFAULT)
    emulation = Emulation(config, job.train_token + job.logprob_token, options.per_process)
    kv: list[float] = []
    try:
        began = first_grant(emulation)
        start, end = (
            began + seconds / options.scale for seconds in (options.warm_up, options.emulated_seconds)
        )
        for second in itertools.count():
            if time.time() >= end:
                break
            if second % 60 == 0:
                done = (time.time() - began) * options.scale
                print(
                    f"  repack={repack}: {done:,.0f} of {options.emulated_seconds:,.0f} emulated seconds",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(1.0)
            found = status.read(Path(config.run_dir))
            loads = [r.load for r in found.ranks if r.load] if found else []
            if emulation.controller.poll() is not None or any(
                p.poll() is not None for p in emulation.fleets.values()
            ):
                raise SystemExit(
                    f"the run ended before its time; see {emulation.run_dir.with_suffix('.log')}"
                )
            if time.time() > start and len(loads) == REPLICAS:
                kv.append(
                    statistics.fmean(load.kv_tokens / load.kv_capacity for load in loads if load.kv_capacity)
                )
    finally:
        emulation.stop(patience=0.0)
    return row(config, repack, start, end, kv, options.scale)


def first_grant(emulation: Emulation) -> float:
    """When the replicas began, seconds since the epoch."""
    while emulation.controller.poll() is None:
        found = status.read(emulation.run_dir)
        loads = [r.load for r in found.ranks if r.load] if found else []
        if len(loads) == REPLICAS and all(load.running for load in loads):
            return time.time()
        time.sleep(0.2)
    raise SystemExit(f"the run did not begin; see {emulation.run_dir.with_suffix('.log')}")


def row(config, repack: str, start: float, end: float, kv: list[float], scale: float) -> dict:
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    ended = database.execute(
        "SELECT response_length, time_finished - time_started FROM trajectories "
        "WHERE time_finished BETWEEN ? AND ?",
        (start, end),
    ).fetchall()
    database.close()
    moves = [
        r for r in rundata.load(Path(config.run_dir)).records.get("move", []) if start <= r["time"] <= end
    ]
    latencies = [seconds * scale for _, seconds in ended]
    return {
        "what": "emulated",
        "repack": repack,
        "tokens/s": sum(n for n, _ in ended) / ((end - start) * scale),
        "KV use": statistics.fmean(kv),
        "latency s": statistics.fmean(latencies),
        "latency max": max(latencies),
        "trajectories": len(ended),
        "moves": len(moves),
        "prefill tokens saved": sum(r["prefix_tokens"] for r in moves),
    }


def simulated(rules: Rules, changed: dict[str, float]) -> tuple[float, float, float]:
    """(generated tokens per second, KV use, mean latency) of the same setting in the simulator; `changed`:
    factors by name."""
    constants = dataclasses.replace(
        DEFAULT, **{k: getattr(DEFAULT, k) * v for k, v in changed.items() if hasattr(DEFAULT, k)}
    )
    sigma, median = SIGMA * changed.get("sigma", 1.0), MEDIAN * changed.get("median", 1.0)
    mean = capped_mean(math.log(median), sigma, CAP)
    workload = WorkloadConfig(mean_response_tokens=mean, max_response_tokens=CAP, sigma=sigma)
    rollouts = [(GPUS["H800"], REPLICAS * GPUS_EACH, GPUS_EACH, None)]
    setup = simulated_setup(
        rules,
        MODELS["32B"],
        GPUS["H800"],
        TRAINING_GPUS,
        rollouts,
        workload,
        constants,
        steps=8,
        warmup_steps=2,
        max_concurrent=CONCURRENT,
    )
    capacity = int(KV_TOKENS * changed.get("kv_tokens", 1.0))
    kinds = tuple(
        dataclasses.replace(kind, capacity=capacity, saturation=CONCURRENT) for kind in setup.engines
    )
    figures = simulate(dataclasses.replace(setup, engines=kinds)).figures
    return figures["generated_per_second"], figures["kv_use"], figures["latency_mean"]


def sensitivity() -> list[dict]:
    rows = []
    for name, factor in [("", 1.0)] + [(name, factor) for name in VARIED for factor in (0.8, 1.2)]:
        changed = {name: factor} if name else {}
        without, with_kv = simulated(OFF, changed), simulated(AUTO, changed)
        rows.append(
            {
                "what": f"simulated, {name} x {factor}" if name else "simulated",
                "repack": "auto",
                "tokens/s": with_kv[0],
                "KV use": with_kv[1],
                "latency s": with_kv[2],
                "gain": with_kv[0] / without[0],
            }
        )
        print(f"  {rows[-1]['what']}: gain {rows[-1]['gain']:.3f}", file=sys.stderr, flush=True)
    return rows


def demo(seed: int) -> float:
    """Two replicas of 0.5B whose answers have some twenty tokens: no tail is worth a move."""
    workload = WorkloadConfig(
        mean_response_tokens=20, max_response_tokens=64, sigma=0.5, prompts_per_step=64, samples_per_prompt=8
    )
    rates = []
    for repack in ("off", "auto"):
        rules = dataclasses.replace(PIPELINES["laminar"], repack=repack)
        gpu, model = GPUS["H100"], MODELS["0.5B"]
        setup = simulated_setup(
            rules, model, gpu, 1, [(gpu, 2, 1, None)], workload, DEFAULT, steps=20, warmup_steps=2, seed=seed
        )
        rates.append(simulate(setup).figures["tokens_per_second"])
    return rates[1] / rates[0]


def planner_milliseconds(replicas: int = 1000) -> float:
    """The worst of 20 plans over replicas in ramp-down, all of one weight id, which is the hardest case."""
    draw, worst, costs = random.Random(0), 0.0, MoveCosts(forced=True)
    limits = EngineLimits(0.9 * KV_TOKENS, CONCURRENT)
    for _ in range(20):
        loads = []
        for i in range(replicas):
            kv, count = draw.uniform(1e3, KV_TOKENS), draw.randrange(1, CONCURRENT)
            requests = [RequestView(j, j // 16, kv / count, 0.5 * kv / count) for j in range(count)]
            loads.append(ReplicaView(i, 0, kv, count, lambda requests=requests: requests))
        gc.collect()  # of what was made for the plan, which is not the plan's own
        begun = time.perf_counter()
        plan(loads, limits, costs, replicas)
        worst = max(worst, time.perf_counter() - begun)
    return worst * 1e3


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--emulated-seconds", type=float, default=3600.0, help="length of a run (default 3600)"
    )
    options.add_argument(
        "--warm-up", type=float, default=900.0, help="emulated seconds that are left out (default 900)"
    )
    options.add_argument("--scale", type=float, default=5.0, help="emulated seconds per second (default 5)")
    options.add_argument("--per-process", type=int, default=8, help="replicas per process (default 8)")
    options.add_argument(
        "--only",
        choices=("emulated", "together", "sensitivity", "planner", "demo", "limit"),
        help="one part",
    )
    options = options.parse_args()
    rows, figures = [], {}
    if options.only in (None, "planner"):
        figures["planner_ms_1000"] = planner_milliseconds()
    if options.only in (None, "demo"):
        figures["demo_auto_over_off"] = min(demo(seed) for seed in range(3))
    if options.only in (None, "limit"):
        figures["limit_gain"] = simulated(NEVER_DRAINED, {})[0] / simulated(OFF, {})[0]
    if options.only in (None, "emulated"):
        with common.run_folder(options) as folder:
            without, with_kv = (emulate(options, folder / repack, repack) for repack in ("off", "auto"))
        with_kv["gain"] = with_kv["tokens/s"] / without["tokens/s"]
        rows += [without, with_kv]
        figures |= {
            "throughput_gain": with_kv["gain"],
            "kv_use_without": without["KV use"],
            "kv_use_with": with_kv["KV use"],
            "mean_latency_ratio": with_kv["latency s"] / without["latency s"],
        }
    if options.only == "together":
        ways = {"off": "in_order", "auto": "longest_first"}
        with common.run_folder(options) as folder:
            found = [emulate(options, folder / way, repack, way) for repack, way in ways.items()]
        found[1]["gain"] = figures["together_gain"] = found[1]["tokens/s"] / found[0]["tokens/s"]
        rows += [{**row, "what": f"emulated, {way}"} for way, row in zip(ways.values(), found, strict=True)]
    if options.only in (None, "sensitivity"):
        found = sensitivity()
        rows += found
        gains = [r["gain"] for r in found]
        figures |= {
            "simulated_gain": gains[0],
            "sensitivity_least_gain": min(gains),
            "sensitivity_most_gain": max(gains),
        }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
