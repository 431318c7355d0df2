"""Plans that are carried out: 24 questions to `laminar plan`, each answer tried as a dry run and then, scaled
down, run with emulated engines.

    python bench/plans.py --json plans.json            all: some 85 minutes on two cores
    python bench/plans.py --only node,preemptible      some of them; the others' rows in the file are kept

A plan is run from the very file that it wrote. Scaled down is: so many times fewer replicas of each pool,
with as many times fewer prompts per step, that at most REPLICAS are left where the pools' numbers of replicas
have such a divisor; each replica has the local batches, the KV cache and the GPUs of the plan. EMULATED: the
engines, at the simulator's costs (slower for what an adapter adds, and for the part of a GPU that the trainer
has of it), and the trainer, which takes as long for a token as was predicted. Real:
controller, store, workers, messages, moves and what all of these take. The lengths of responses are the same
in both.

starts         the dry run of the written experiment passes
reached        tokens/s of the run, in emulated seconds and without its first SKIP steps, over those that the
               plan says, divided by the scale. Goal: 0.9
"""

import contextlib
import copy
import io
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import common

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch import cli
from laminar_hpc.machine.files import jsonl
from laminar_hpc.simulator import plan_command
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.divisions import Candidate, describe
from laminar_hpc.simulator.emulated.responses import response_length
from laminar_hpc.simulator.plan import Plan, planned_setup, search
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.settings import load_plan
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.workload import mu_of_mean

STEPS, SKIP, REPLICAS = 12, 6, 8
ENDLESS = 1000  # steps of a run, which is ended after STEPS of them in full swing
RATE = 150.0  # trajectories a second that two cores carry with all else that they do
GROUPS = 4096  # of which lengths are known
SIGMA = 0.8
SHORT = ("workload.mean_response_tokens=400", "workload.max_response_tokens=2048")
LONG = ("workload.mean_response_tokens=2500", "workload.max_response_tokens=8192")
WORK = ("workload.prompts_per_step=32", "workload.samples_per_prompt=8", "workload.updates_per_step=4")


def pool(gpu: str, count: int, **more: object) -> str:
    return "{" + ", ".join(f"{k}: {v}" for k, v in {"gpu": gpu, "count": count, **more}.items()) + "}"


def pools(*each: str) -> str:
    return f"pools=[{', '.join(each)}]"


# name -> the question and its settings
QUESTIONS: dict[str, tuple[str, ...]] = {
    "node": ("node", pools(pool("H100", 8)), *LONG),
    "small-model": ("node", "model=0.5B", pools(pool("H100", 8)), *SHORT),
    "two-gpus": ("node", "model=0.5B", pools(pool("L40S", 2)), *SHORT),
    "a100": ("node", "model=1.5B", pools(pool("A100", 8)), *SHORT),
    "l40s": ("node", "model=3B", pools(pool("L40S", 16)), *SHORT),
    "h20": ("node", "model=7B", pools(pool("H20", 16)), *SHORT),
    "h200": ("node", "model=14B", pools(pool("H200", 8)), *SHORT),
    "b200": ("node", "model=32B", pools(pool("B200", 8)), *SHORT),
    "mi300x": ("node", "model=Qwen3-14B", pools(pool("MI300X", 16)), *LONG),
    "llama": ("node", "model=Llama-3.1-8B", pools(pool("H100", 16)), *SHORT),
    "qwen3": ("node", "model=Qwen3-8B", pools(pool("H800", 16)), *LONG),
    "32b": ("mixed", pools(pool("H800", 64)), *LONG),
    "72b": ("mixed", "model=72B", pools(pool("H800", 128)), *SHORT),
    "mixed": ("mixed", pools(pool("H800", 16), pool("H20", 16)), *LONG),
    "three-kinds": (
        "mixed",
        "model=7B",
        pools(pool("H100", 8), pool("A100", 8), pool("L40S", 4)),
        *SHORT,
    ),
    "preemptible": (
        "cheapest",
        "trainer_busy=0.5",
        pools(pool("H800", 16), pool("H20", 16, price=0.6, preemptible="true", mtbf_hours=6)),
        *LONG,
    ),
    "cheapest": ("cheapest", "model=7B", "trainer_busy=0.6", pools(pool("H100", 32)), *SHORT),
    "fast-enough": (
        "cheapest",
        "model=7B",
        "trainer_busy=0.4",
        "least_throughput=26000",
        pools(pool("H100", 32)),
        *SHORT,
    ),
    "on-policy": ("node", "max_staleness=0", pools(pool("H100", 8)), *SHORT),
    "one-4090": ("node", "model=0.5B", pools(pool("RTX4090", 1)), *SHORT),
    "one-3090-lora": ("node", "model=3B", "lora.rank=16", pools(pool("RTX3090", 1)), *SHORT),
    "two-4090-lora": ("node", "model=7B", "lora.rank=16", pools(pool("RTX4090", 2)), *SHORT),
    "four-l4-lora": ("node", "model=7B", "lora.rank=16", pools(pool("L4", 4)), *SHORT),
    "few-at-once": ("node", "max_concurrent=32", "max_staleness=1", pools(pool("H100", 8)), *LONG),
}
COLUMNS = ("question", "plan", "starts", "predicted tokens/s", "scale", "time scale", "reached")


@dataclass(frozen=True)
class Asked:
    """A question with its answer. `folder`: what the plan wrote; `median`: of the responses."""

    config: PlanConfig
    plan: Plan
    folder: Path
    median: float

    @property
    def candidate(self) -> Candidate:
        return self.plan.best.candidate

    @property
    def figures(self) -> dict:
        assert self.plan.best.figures is not None
        return self.plan.best.figures


def ask(name: str, folder: Path) -> Asked:
    """The plan, its files under `folder`, and its responses' lengths as the emulated engines will draw
    them."""
    question, *settings = QUESTIONS[name]
    window = (f"steps={STEPS}", f"warmup_steps={SKIP}")
    words = [*WORK, *settings, *window, f"workload.sigma={SIGMA}", f"name={name}", f"out_dir={folder}"]
    config = load_plan(question, words)
    w = config.workload
    median = math.exp(mu_of_mean(w.mean_response_tokens, w.sigma, w.max_response_tokens))
    samples = w.samples_per_prompt
    folder.mkdir(parents=True, exist_ok=True)
    lengths = folder / "lengths.jsonl"
    rows = (
        [
            response_length(group * samples + i, group, median, w.sigma, w.max_response_tokens)
            for i in range(samples)
        ]
        for group in range(GROUPS)
    )
    lengths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_plan(question, [*words, f"workload.lengths_file={lengths}"])
    plan = search(config)
    plan_command.write(config, plan, folder)
    return Asked(config, plan, folder, median)


def starts(name: str, folder: Path) -> bool:
    """Whether `laminar train ... dry_run=true` takes the file."""
    with contextlib.redirect_stdout(io.StringIO()):
        return cli.run(["train", "--config-dir", str(folder), f"experiment={name}", "dry_run=true"]) == 0


def scale_of(asked: Asked) -> int:
    """The smallest divisor of replicas and prompts that leaves at most REPLICAS, or else the largest one."""
    counts = [gpus // tp for _, gpus, tp in asked.candidate.rollouts]
    common_divisor = math.gcd(asked.config.workload.prompts_per_step, *counts)
    divisors = [n for n in range(1, common_divisor + 1) if common_divisor % n == 0]
    return next((n for n in divisors if sum(counts) // n <= REPLICAS), divisors[-1])


def emulated_config(asked: Asked, folder: Path, scale: int, step_seconds: float) -> RunConfig:
    """The written experiment with emulated engines and less work, a step of which takes about so many
    seconds."""
    name, w = asked.config.name, asked.config.workload
    written = load_config(["--config-dir", str(asked.folder), f"experiment={name}", "dry_run=true"])
    config = prepare(folder, 4_000, w.prompt_tokens, w.max_response_tokens)
    config.steps, config.algorithm, config.pipeline = ENDLESS, written.algorithm, written.pipeline
    config.algorithm.prompts_per_step //= scale
    trajectories = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    seconds = max(step_seconds, trajectories / RATE)
    e, r = config.emulation, config.rollout
    e.time_scale = max(1.0, asked.figures["step_seconds"] / seconds)
    e.model, e.tensor_parallel, e.wire_share = asked.config.model, asked.candidate.tensor_parallel, 1e-4
    e.median_response_tokens, e.sigma = asked.median, w.sigma
    if (slower := slowed(asked)) != 1.0:
        e.constants = {"generation_error": slower}
    config.pipeline.repack_seconds /= e.time_scale
    r.replicas, r.max_concurrent = written.rollout.replicas // scale, written.rollout.max_concurrent
    r.kv_cache_tokens, r.request_timeout_seconds = written.rollout.kv_cache_tokens, 3600.0
    config.cluster.heartbeat_timeout_seconds = config.cluster.join_timeout_seconds = 120.0
    config.reward.slots, config.archive = 256, "last:1"
    return config


def slowed(asked: Asked) -> float:
    """How many times as long the plan's engine takes as one of its GPU type that serves the model alone."""
    index, _, tensor = asked.candidate.rollouts[0]
    gpu = GPUS[asked.config.pools[index].gpu]
    alone = engine_costs(MODELS[asked.config.model], gpu, tensor, DEFAULT)
    return planned_setup(asked.config, asked.candidate).engines[0].costs.weights / alone.weights


def carry_out(asked: Asked, config: RunConfig, scale: int, limit: float) -> float:
    """Tokens per emulated second of the scaled-down run. Raises SystemExit when it doesn't end well."""
    f = asked.figures
    # what the trainer takes in all, publications and checkpoints included
    training = f["step_seconds"] * (1.0 - f["trainer_wait_share"]) / f["tokens_per_step"] * scale
    kinds = []
    for index, gpus, tensor_parallel in asked.candidate.rollouts:
        own = copy.deepcopy(config)
        own.emulation.gpu = asked.config.pools[index].gpu
        kinds.append((own, gpus // tensor_parallel // scale))
    emulation = Emulation(config, training, per_process=4, kinds=kinds)
    deadline, done = time.monotonic() + limit, list[dict]()
    try:
        while len(done) < STEPS:
            if emulation.wait(0.5) is not None or time.monotonic() > deadline:
                log = emulation.run_dir.with_suffix(".log")
                raise SystemExit(f"{asked.config.name}: {len(done)} of {STEPS} steps; see {log}")
            metrics = emulation.run_dir / "metrics.jsonl"
            done = [r for r in jsonl.read(metrics) if r["kind"] == "step"] if metrics.exists() else []
    finally:
        emulation.stop(patience=0.0)
    tokens = sum(r["prompt_tokens"] + r["response_tokens"] for r in done[SKIP:STEPS])
    return tokens / (done[STEPS - 1]["time"] - done[SKIP - 1]["time"]) / config.emulation.time_scale


def row(name: str, folder: Path, step_seconds: float, limit: float) -> dict:
    """A question's plan, whether it starts, and how much of what it says it reaches."""
    try:
        asked = ask(name, folder)
    except LaminarError as error:
        return {"question": name, "plan": str(error), "starts": False}
    scale, rate = scale_of(asked), asked.figures["tokens_per_second"]
    config = emulated_config(asked, folder / "emulated", scale, step_seconds)
    reached = carry_out(asked, config, scale, limit) / (rate / scale)
    return {
        "question": name,
        "plan": describe(asked.config, asked.candidate),
        "starts": starts(name, folder),
        "predicted tokens/s": round(rate),
        "scale": scale,
        "time scale": config.emulation.time_scale,
        "reached": reached,
    }


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--only", default=",".join(QUESTIONS), help="questions, separated by commas")
    options.add_argument(
        "--runs-dir", type=Path, help="keep plans and runs there (default: a temporary folder)"
    )
    options.add_argument(
        "--step-seconds",
        type=float,
        default=20.0,
        help="of a step of an emulated run: what messages take counts for so much less (default 20)",
    )
    options.add_argument(
        "--run-seconds", type=float, default=600.0, help="time limit of one run (default 600)"
    )
    options = options.parse_args()
    names = options.only.split(",")
    rows = kept(options.json, names)
    for name in names:
        with common.run_folder(options) as folder:
            rows.append(row(name, folder / name, options.step_seconds, options.run_seconds))
        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    reached = [found["reached"] for found in rows if "reached" in found]
    figures = {
        "questions": len(rows),
        "plans_that_start": sum(found["starts"] for found in rows),
        "reached_min": min(reached, default=None),
        "reached_median": common.median(reached),
    }
    common.finish(options, figures, sorted(rows, key=lambda r: list(QUESTIONS).index(r["question"])), COLUMNS)


def kept(path: Path | None, names: list[str]) -> list[dict]:
    """Rows of an earlier file, without the questions that are asked again."""
    if path is None or not path.exists():
        return []
    return [found for found in json.loads(path.read_text())["rows"] if found["question"] not in names]


if __name__ == "__main__":
    main()
