"""Short live runs of all roles on one machine, through the `laminar` command. Run by bench/gpu_check.

    export PYTHONPATH=bench
    python bench/gpu_check/live.py --part pair --steps 20    sync, then laminar: tokens per second, mismatch
    python bench/gpu_check/live.py --part engine_killed      the engine dies, another takes its place
    python bench/gpu_check/live.py --part relay_killed       the same of relays, with roles apart
    python bench/gpu_check/live.py --part keep_kv            new weights come into running requests
    python bench/gpu_check/live.py --part repack             two engines on one GPU, KV moves between them
    python bench/gpu_check/live.py --part resume             a checkpoint, a new start from it
    python bench/gpu_check/live.py --part experts            the shipped mixture, published from a copy

The model has random weights (--shape) but for `experts`, the tasks are the example's, rewards are drawn.
Each run must end by itself, and `laminar audit` must find nothing in it. `mismatch_over_limit` is the
log-prob mismatch between engine and trainer, mean over a probe, the largest of all weight ids, over the limit
that a run warns at.
"""

import argparse
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import common
import faults
import psutil
import roles
import shapes
import torch

from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read

SKIP = 2  # steps that are not counted
ENGINE = "laminar_hpc.engine.sglang.plugin.serve"
COLUMNS = ("run", "steps", "tokens/s", "staleness", "mismatch", "pulls", "moves", "moves off", "audit")
Figures = dict[str, float | None]


def settings(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """What all runs have; a GPU's are a small model's, the CPU's a tiny one's."""
    model = shapes.make_model(folder / f"model-{options.shape}", shapes.shape(options.shape))
    found: dict[str, object] = {
        "model.path": model,
        "evaluation.files": "[]",
        "optimizer.lr": 1e-6,
        "reward.function": "bench.rewards.drawn",
    }
    if not torch.cuda.is_available():
        return found | {
            "algorithm.prompts_per_step": 4,
            "algorithm.samples_per_prompt": 4,
            "sampling.max_response_tokens": 48,
            "rollout.kv_cache_tokens": 8192,
        }
    return found | {
        "model.dtype": "bfloat16",
        "algorithm.prompts_per_step": 16,
        "sampling.max_response_tokens": 512,
        "trainer.tokens_per_microbatch": 8192,
        "trainer.devices": "[0]",
        "rollout.devices": "[0]",
        "rollout.kv_cache_tokens": 100000,
        "rollout.engine_start_seconds": 600,
        "rollout.engine_arguments.mem-fraction-static": 0.3,
    }


def culprits(run_dir: Path) -> int:
    with read(run_dir) as records:
        found = [text for finding in audit(records) for text in finding.culprits]
    for text in found:
        print(f"  audit: {text}", flush=True)
    return len(found)


def row_of(name: str, run: Run) -> dict:
    mismatch = [record["mean"] for record in run.records.get("logprob_mismatch", [])]
    steps = run.steps
    return {
        "run": name,
        "steps": len(steps),
        "tokens/s": common.tokens_per_second(run, SKIP) if len(steps) > SKIP else None,
        "staleness": sum(step["staleness_training_mean"] for step in steps) / max(1, len(steps)),
        "mismatch": max(mismatch, default=None),
        "pulls": len(run.records.get("pull", [])),
        "moves": len(run.records.get("move", [])),
        "moves off": len(run.records.get("move_off", [])),
        "audit": culprits(run.directory),
        "mismatch of each weight id": mismatch,
    }


def over_limit(*runs: Run) -> float | None:
    records = [record for run in runs for record in run.records.get("logprob_mismatch", [])]
    return max((record["mean"] / record["limit"] for record in records), default=None)


def train(options: argparse.Namespace, folder: Path, name: str, more: dict[str, object]) -> Run:
    run = common.train(options, folder, name, settings(options, folder) | more)
    shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)  # gigabytes, of no further use
    return run


# ---- the parts ---------------------------------------------------------------------------------------------


def pair(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    runs = {name: train(options, folder, name, {"pipeline": name}) for name in ("sync", "laminar")}
    rows = [row_of(name, run) for name, run in runs.items()]
    sync, laminar = (row["tokens/s"] for row in rows)
    return {
        "tokens_per_second": laminar,
        "laminar_over_sync": laminar / sync if laminar and sync else None,
        "mismatch_over_limit": over_limit(*runs.values()),
    }, rows


def kill_engine(run_dir: Path, killed: list[float], over: threading.Event) -> None:
    """Kills the engine of the run below this process once it has made a step."""
    while not over.wait(0.2):
        if not roles.steps_done(run_dir):
            continue
        for process in psutil.Process().children(recursive=True):
            try:
                if ENGINE in process.cmdline():
                    process.kill()
                    killed.append(time.time())
                    return
            except psutil.Error:
                continue  # it has just ended


def engine_killed(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    killed, over = list[float](), threading.Event()
    killer = threading.Thread(target=kill_engine, args=(folder / "killed", killed, over), daemon=True)
    killer.start()
    try:
        # in one world a dead engine ends the world, which starts again from its checkpoint
        run = train(options, folder, "killed", {"restarts": 3, "checkpoint.every": 1})
    finally:
        over.set()
        killer.join()
    if not killed:
        raise SystemExit("the run ended before its engine could be killed: give it more --steps")
    later = [pull["time"] for pull in run.records.get("pull", []) if pull["time"] > killed[0]]
    back = min(later, default=None)
    return {"engine_back_seconds": back - killed[0] if back else None, "killed": 1.0}, [row_of("killed", run)]


def relay_killed(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    """Roles apart, as only there a relay may die; see bench/faults.py."""
    words = (f"{k}={v}" for k, v in settings(options, folder).items() if k != "evaluation.files")
    options.overrides = [*words, *options.overrides]
    options.kinds, options.seed, options.seconds, options.every = ["kill-relay"], 0, 20.0, 10.0
    _, hits, _, _ = faults.faulty(options, folder)
    row = row_of("relay-killed", rundata.load(folder / "faults"))
    shutil.rmtree(folder / "faults" / "checkpoints", ignore_errors=True)
    return {"killed": float(len(hits)), "relay_seconds": common.median([hit["back"] for hit in hits])}, [row]


def keep_kv(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    run = train(options, folder, "keep-kv", {"pipeline": "partial", "pipeline.keep_kv": "true"})
    versions = max(step["versions_per_trajectory_max"] for step in run.steps)
    return {"versions_max": versions, "mismatch_over_limit": over_limit(run)}, [row_of("keep-kv", run)]


def repack(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    # Most responses must be far shorter than the longest ones: a replica is emptied when its KV cache
    # shrinks, and with lengths near the maximum all end at once.
    options.shape += "-few-tokens"
    more: dict[str, object] = {
        "sampling.max_response_tokens": 512,
        "rollout.replicas": 2,
        "pipeline.repack": "kv",
        "pipeline.repack_seconds": 0.2,
        "pipeline.repack_requests": 64,
    }
    if torch.cuda.is_available():
        more |= {"rollout.devices": "[0,0]", "rollout.engine_arguments.mem-fraction-static": 0.2}
    run = train(options, folder, "repack", more)
    row = row_of("repack", run)
    moved = [move["prefix_tokens"] > 0 for move in run.records.get("move", [])]
    share = sum(moved) / len(moved) if moved else None
    return {"moves": row["moves"], "moves_off": row["moves off"], "moves_with_kv": share}, [row]


def resume(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    first, run_dir = max(2, (options.steps or 4) // 2), folder / "resume"
    base, options.steps = settings(options, folder) | {"checkpoint.every": 1}, None
    common.train(options, folder, "resume", {**base, "steps": first})
    run = common.train(options, folder, "resume", {**base, "steps": 2 * first, "resume": "auto"}, again=True)
    shutil.rmtree(run_dir / "checkpoints")
    restored = run.launches[-1].restored_step
    if restored != first:
        raise SystemExit(f"the second start has restored step {restored}, not {first}")
    saved = [record["seconds"] for record in run.records.get("checkpoint", [])]
    return {"checkpoint_seconds": common.median(saved), "restored_step": restored}, [row_of("resume", run)]


def experts(options: argparse.Namespace, folder: Path) -> tuple[Figures, list[dict]]:
    """Trainer and engine of the example's mixture of experts, which has weights and tasks of its own."""
    options.experiment, options.shape = "moe", "tiny"
    more = {"relay.publish": "copied", "sampling.max_response_tokens": 48}
    words = settings(options, folder) | more
    del words["model.path"], words["reward.function"]
    run = common.train(options, folder, "experts", words)
    shutil.rmtree(folder / "experts" / "checkpoints", ignore_errors=True)
    row = row_of("experts", run)
    return {"tokens_per_second": row["tokens/s"], "mismatch_over_limit": over_limit(run)}, [row]


PARTS: dict[str, Callable[[argparse.Namespace, Path], tuple[Figures, list[dict]]]] = {
    part.__name__: part for part in (pair, engine_killed, relay_killed, keep_kv, repack, resume, experts)
}


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--part", choices=PARTS, required=True)
    options.add_argument("--shape", choices=("tiny", "0.5b"), default="0.5b", help="default 0.5b")
    options = options.parse_args()
    with common.run_folder(options) as folder:
        figures, rows = PARTS[options.part](options, folder)
    figures["audit_culprits"] = float(sum(row["audit"] for row in rows))
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
