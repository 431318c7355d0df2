"""Several adapters at once (pipeline=versions) beside the drained pipeline, on emulated replicas of
Qwen2.5-32B with the long-tailed lengths of bench/repack.py, at the same bound on staleness.

    python bench/versions.py --json versions.json     both runs side by side, 4,200 emulated seconds at ten
                                                      times real time
    python bench/versions.py --scale 5                where there is less time than cores

EMULATED: the engines generate nothing, the trainer trains nothing. Real: controller, store, rollout workers,
sockets, messages, loading and unloading of adapters. Both runs have LoRA and the same 4 replicas of 4 H800
with 850,000 KV tokens and 256 requests each, 16 H800 that train, 64 x 16 trajectories per step, and a bound
of 4 steps.

versions_over_drained  response tokens of trajectories that end, per second, over those of pipeline=laminar;
                       goal >= 1.25
staleness_max          of what is trained, in steps; must not exceed the bound
policies_max           per trajectory; must be 1. Both are also audited: audit_culprits must be 0
simulated              the same ratio in the simulator, which runs the same policies; simulated_repack: over
                       pipeline=laminar with pipeline.repack=kv
"""

import argparse
import dataclasses
import itertools
import math
import sqlite3
import sys
import time
from pathlib import Path

import common
from repack import CAP, CONCURRENT, KV_TOKENS, MEDIAN, SIGMA, WIRE_SHARE

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.report import rundata
from laminar_hpc.simulator.constants import DEFAULT, PROMPT_TOKENS
from laminar_hpc.simulator.published_layout import trainer_layout
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import setup as simulated_setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import job_costs
from laminar_hpc.simulator.workload import capped_mean
from laminar_hpc.store import status
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read

REPLICAS, GPUS_EACH, TRAINING_GPUS, GROUPS, SAMPLES, BOUND = 4, 4, 16, 64, 16, 4
STEPS = 400  # never reached: the runs are cut off
GOAL = 1.25
COLUMNS = ("what", "pipeline", "tokens/s", "trajectories", "staleness", "policies", "audit", "over drained")


def begin(options: argparse.Namespace, folder: Path, refresh: str) -> Emulation:
    """Starts a run."""
    folder.mkdir(parents=True)
    config = prepare(folder, 6_000, PROMPT_TOKENS, CAP)
    config.steps = STEPS
    config.model.lora.rank = 16
    r, e, p = config.rollout, config.emulation, config.pipeline
    r.replicas = REPLICAS
    r.kv_cache_tokens = KV_TOKENS
    r.max_concurrent = CONCURRENT
    r.request_timeout_seconds = 3600.0
    config.algorithm.prompts_per_step = GROUPS
    config.algorithm.samples_per_prompt = SAMPLES
    config.reward.slots = 64
    config.cluster.heartbeat_timeout_seconds = config.cluster.join_timeout_seconds = 300.0
    e.time_scale = options.scale
    e.median_response_tokens = MEDIAN
    e.sigma = SIGMA
    e.wire_share = WIRE_SHARE
    p.refresh = refresh
    p.max_staleness = BOUND
    work = WorkloadConfig(max_response_tokens=CAP)
    layout = trainer_layout(MODELS["32B"], GPUS["H800"], TRAINING_GPUS, work, DEFAULT)
    assert layout is not None
    job = job_costs(MODELS["32B"], GPUS["H800"], TRAINING_GPUS, layout, REPLICAS * GPUS_EACH, CAP, DEFAULT)
    return Emulation(config, job.train_token + job.logprob_token, REPLICAS)


def until_at_work(emulation: Emulation) -> None:
    """Returns when all replicas generate."""
    while emulation.controller.poll() is None:
        found = status.read(emulation.run_dir)
        loads = [rank.load for rank in found.ranks if rank.load] if found else []
        if len(loads) == REPLICAS and all(load.running for load in loads):
            return
        time.sleep(0.2)
    raise SystemExit(f"the run did not begin; see {emulation.run_dir.with_suffix('.log')}")


def emulated(options: argparse.Namespace, folder: Path) -> list[dict]:
    """Both runs side by side, over the same window of time."""
    runs: dict[str, Emulation] = {}
    try:
        for refresh in ("drained", "versions"):
            runs[refresh] = begin(options, folder / refresh, refresh)
        for emulation in runs.values():
            until_at_work(emulation)
        began = time.time()
        start, end = (
            began + seconds / options.scale for seconds in (options.warm_up, options.emulated_seconds)
        )
        for second in itertools.count():
            if time.time() >= end:
                break
            if second % 60 == 0:
                done = (time.time() - began) * options.scale
                text = f"  {done:,.0f} of {options.emulated_seconds:,.0f} emulated seconds"
                print(text, file=sys.stderr, flush=True)
            time.sleep(1.0)
            for emulation in runs.values():
                if emulation.controller.poll() is not None:
                    raise SystemExit(f"a run ended too early; see {emulation.run_dir.with_suffix('.log')}")
    finally:
        for emulation in runs.values():
            emulation.stop()
    return [row(runs[refresh].config, refresh, start, end, options.scale) for refresh in runs]


def row(config: RunConfig, refresh: str, start: float, end: float, scale: float) -> dict:
    """What a run's records say."""
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    count, tokens = database.execute(
        "SELECT COUNT(*), SUM(response_length) FROM trajectories WHERE time_finished BETWEEN ? AND ?",
        (start, end),
    ).fetchone()
    policies = database.execute("SELECT MAX(policies) FROM trajectories").fetchone()[0]
    database.close()
    consumed = rundata.load(Path(config.run_dir)).consumed
    if not consumed:
        raise SystemExit(
            f"{refresh}: nothing was trained within {(end - start) * scale:,.0f} emulated seconds, so this "
            "machine is too busy for the emulated pace: give a lower --scale, or try again when it is quiet"
        )
    with read(Path(config.run_dir)) as records:
        wrong = [text for finding in audit(records) for text in finding.culprits]
    for text in wrong[:5]:
        print(f"  {refresh}: {text}", file=sys.stderr)
    return {
        "what": "emulated",
        "pipeline": refresh,
        "tokens/s": (tokens or 0) / ((end - start) * scale),
        "trajectories": count,
        "staleness": max(t.staleness_training for t in consumed),
        "policies": policies,
        "audit": len(wrong),
    }


def simulated(name: str) -> dict:
    """The same in the simulator."""
    mean = capped_mean(math.log(MEDIAN), SIGMA, CAP)
    work = WorkloadConfig(
        prompts_per_step=GROUPS,
        samples_per_prompt=SAMPLES,
        mean_response_tokens=mean,
        max_response_tokens=CAP,
        sigma=SIGMA,
    )
    made = simulated_setup(
        dataclasses.replace(PIPELINES[name], max_staleness=BOUND),
        MODELS["32B"],
        GPUS["H800"],
        TRAINING_GPUS,
        [(GPUS["H800"], REPLICAS * GPUS_EACH, GPUS_EACH, None)],
        work,
        DEFAULT,
        steps=20,
        warmup_steps=4,
        max_concurrent=CONCURRENT,
        equal_batches=True,
    )
    kinds = tuple(
        dataclasses.replace(kind, capacity=KV_TOKENS, saturation=CONCURRENT) for kind in made.engines
    )
    figures = simulate(dataclasses.replace(made, engines=kinds)).figures
    return {
        "what": "simulated",
        "pipeline": name,
        "tokens/s": figures["generated_per_second"],
        "trajectories": figures["finished_trajectories"],
        "staleness": figures["staleness_training_max"],
        "policies": figures["versions_max"],
    }


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--emulated-seconds", type=float, default=4200.0, help="length of the runs (default 4200)"
    )
    options.add_argument(
        "--warm-up", type=float, default=1200.0, help="emulated seconds that are left out (default 1200)"
    )
    options.add_argument("--scale", type=float, default=10.0, help="emulated seconds per second (default 10)")
    options.add_argument("--only", choices=("emulated", "simulated"), help="one part")
    options = options.parse_args()
    rows: list[dict] = []
    figures: dict[str, float | None] = {}
    if options.only in (None, "emulated"):
        with common.run_folder(options) as folder:
            drained, versions = emulated(options, folder)
        versions["over drained"] = versions["tokens/s"] / drained["tokens/s"]
        rows += [drained, versions]
        figures |= {
            "versions_over_drained": versions["over drained"],
            "goal": GOAL,
            "staleness_max": versions["staleness"],
            "policies_max": versions["policies"],
            "audit_culprits": drained["audit"] + versions["audit"],
        }
    if options.only in (None, "simulated"):
        drained, repack, versions = (simulated(n) for n in ("laminar_no_repack", "laminar", "versions"))
        versions["over drained"] = versions["tokens/s"] / drained["tokens/s"]
        rows += [drained, repack, versions]
        figures["simulated"] = versions["over drained"]
        figures["simulated_repack"] = versions["tokens/s"] / repack["tokens/s"]
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
