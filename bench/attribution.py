"""What each idea brings: the ladder from synchronous training to Laminar with moving KV caches, all at the
same resources, in one run.

    python bench/attribution.py --json attribution.json       emulated (about 10 minutes) and real (about 20)
    python bench/attribution.py --only emulated --scale 30    shorter, where the machine has cores to spare

EMULATED: 4 replicas of Qwen2.5-32B on 4 H800 each, 16 H800 that train (trainer and rollouts never share GPUs,
in `sync` neither), 64 x 16 trajectories per step, 4 optimizer updates per step, log-normal lengths of median
1,097 and sigma 1.69 up to 8,192 tokens. Engines, trainer and relay are emulated; controller, store, workers,
messages and moves are real. REAL: the example unchanged but for two replicas and no evaluation, on SGLang and
Megatron; its responses are short, so there is little for repack to move.

tokens/s        prompt and response tokens of trained batches between updates, without the first SKIP steps;
                emulated seconds where emulated
over sync       the same, over the first row's; `over last`: over the row above
trainer idle    share of the time in which no batch is trained on
rollout idle    in which a replica neither generates nor pulls; a tail of one request counts as generating
s to 0.70       as in bench/async_vs_sync.py; nothing can be learned from emulated engines
"""

import argparse
from pathlib import Path

import common
import yaml

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.report import rundata
from laminar_hpc.report.idle import busy, overlap
from laminar_hpc.report.rundata import Run
from laminar_hpc.simulator.constants import DEFAULT, PROMPT_TOKENS
from laminar_hpc.simulator.published_layout import trainer_layout
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import job_costs

LADDER = {  # name -> preset, and what differs from it
    "sync": ("sync", {}),
    "one_step": ("one_step", {}),
    "stream": ("stream", {}),
    "partial": ("partial", {}),
    "laminar": ("laminar", {"repack": "off"}),
    "laminar auto": ("laminar", {}),
    "laminar reprefill": ("laminar", {"repack": "reprefill"}),
    "laminar kv": ("laminar", {"repack": "kv"}),
}
REPLICAS, GPUS_EACH, TRAINING_GPUS = 4, 4, 16
GROUPS, SAMPLES, UPDATES, CAP, KV_TOKENS, CONCURRENT = 64, 16, 4, 8192, 850_000, 256
SKIP, EMULATED_STEPS, REAL_STEPS = 2, 6, 24
REAL = {"rollout.replicas": 2, "evaluation.files": "[]", "checkpoint.every": 1000}
REAL_REPACK = {"pipeline.repack_seconds": 0.1, "pipeline.repack_requests": 256}
COLUMNS = (
    "what",
    "pipeline",
    "tokens/s",
    "over sync",
    "over last",
    "trainer idle",
    "rollout idle",
    "staleness",
    "staleness max",
    "versions",
    "moved",
    "s to 0.70",
)


def emulated_config(folder: Path, name: str, scale: float) -> RunConfig:
    config = prepare(folder, 4_000, PROMPT_TOKENS, CAP)
    config.steps = EMULATED_STEPS
    config.rollout.replicas, config.rollout.kv_cache_tokens, config.rollout.max_concurrent = (
        REPLICAS,
        KV_TOKENS,
        CONCURRENT,
    )
    config.rollout.request_timeout_seconds = 3600.0
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = GROUPS, SAMPLES
    config.algorithm.minibatches_per_step, config.reward.slots = UPDATES, 256
    config.cluster.heartbeat_timeout_seconds = config.cluster.join_timeout_seconds = 120.0
    config.emulation.time_scale, config.emulation.wire_share = scale, 1e-4
    preset, changes = LADDER[name]
    values = yaml.safe_load((common.ROOT / f"conf/pipeline/{preset}.yaml").read_text())
    values |= {"repack_seconds": DEFAULT.repack_period / scale, "repack_requests": CONCURRENT, **changes}
    for key, value in values.items():
        setattr(config.pipeline, key, value)
    return config


def emulate(options: argparse.Namespace, folder: Path, name: str) -> Run:
    folder.mkdir(parents=True)
    layout = trainer_layout(
        MODELS["32B"], GPUS["H800"], TRAINING_GPUS, WorkloadConfig(max_response_tokens=CAP), DEFAULT
    )
    assert layout is not None
    job = job_costs(MODELS["32B"], GPUS["H800"], TRAINING_GPUS, layout, REPLICAS * GPUS_EACH, CAP, DEFAULT)
    emulation = Emulation(
        emulated_config(folder, name, options.scale), job.train_token + job.logprob_token, options.per_process
    )
    try:
        code = emulation.wait(options.run_seconds)
    finally:
        emulation.stop()
    if code != 0:
        raise SystemExit(
            f"{name} ended with {code} (None: still running after {options.run_seconds:.0f} s); "
            f"see {folder}/run.log"
        )
    return rundata.load(emulation.run_dir)


def train(options: argparse.Namespace, folder: Path, name: str) -> Run:
    preset, changes = LADDER[name]
    settings = {
        "steps": REAL_STEPS,
        "pipeline": preset,
        **REAL,
        **{f"pipeline.{key}": value for key, value in changes.items()},
    }
    return common.train(options, folder, name.replace(" ", "-"), settings | (REAL_REPACK if changes else {}))


def row(run: Run, what: str, name: str, scale: float) -> dict:
    window = (run.steps[SKIP - 1]["time"], run.steps[-1]["time"])
    length, steps = window[1] - window[0], run.steps[SKIP:]
    replicas = [spans for process, spans in run.spans.items() if process.startswith("rollout")]
    return {
        "what": what,
        "pipeline": name,
        "tokens/s": common.tokens_per_second(run, SKIP) / scale,
        "trainer idle": 1.0 - sum(step["train_seconds"] for step in steps) / length,
        "rollout idle": 1.0
        - sum(overlap(busy(spans), [window]) for spans in replicas) / (length * len(replicas)),
        "staleness": sum(step["staleness_training_mean"] for step in steps) / len(steps),
        "staleness max": int(max(step["staleness_training_max"] for step in run.steps)),
        "versions": run.versions_max(),
        "moved": len(run.records.get("move", [])),
        "s to 0.70": common.seconds_to_accuracy(run) if what == "real" else None,
    }


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--scale", type=float, default=20.0, help="emulated seconds per second (default 20)")
    options.add_argument(
        "--per-process", type=int, default=4, help="emulated replicas per process (default 4)"
    )
    options.add_argument("--only", choices=("emulated", "real"), help="one of the two halves")
    options = options.parse_args()
    rows: list[dict] = []
    figures: dict[str, float | None] = {}
    with common.run_folder(options) as folder:
        for what in ("emulated", "real"):
            ladder: list[dict] = []
            for name in LADDER if options.only in (None, what) else ():
                emulated = what == "emulated"
                run = (
                    emulate(options, folder / name.replace(" ", "-"), name)
                    if emulated
                    else train(options, folder, name)
                )
                found = row(run, what, name, options.scale if emulated else 1.0)
                first, last = (ladder[0], ladder[-1]) if ladder else (found, found)
                found |= {
                    "over sync": found["tokens/s"] / first["tokens/s"],
                    "over last": found["tokens/s"] / last["tokens/s"],
                }
                print(f"  {what} {name}: {found['tokens/s']:.0f} tokens/s", flush=True)
                ladder.append(found)
            rows += ladder
            figures |= {
                f"{what}_{r['pipeline'].replace(' ', '_')}_over_sync": r["over sync"] for r in ladder[1:]
            }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
