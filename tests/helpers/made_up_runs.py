"""A run whose every second is known, with engines and a trainer made up here."""

import dataclasses
import random
from pathlib import Path

from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report.rundata import Consumed, Run, RunLaunch
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.finished.decode import MeasuredBatch, Queue, work_before
from laminar_hpc.simulator.request import EngineAdmission

PROMPT = 10
START, STEP, TOKEN, KV = 0.5, 0.002, 0.0001, 2e-7  # seconds of the engines made up here
SLOWER = (1.0, 1.25)  # their replicas
TRAIN_STEP, TRAIN_TOKEN, PUBLISH, RELAY, PULL = 0.4, 4e-4, 0.1, 0.05, 0.2


def queue(max_concurrent: int = 256, kv_cache_tokens: int = 1 << 20, longest: int = 256) -> Queue:
    return Queue(PROMPT, kv_cache_tokens, max_concurrent, EngineAdmission.of(longest, DEFAULT))


def batch_of(lengths: list[int], of: Queue, replica: int = 0) -> MeasuredBatch:
    """A local batch as the engines made up here take it."""
    ends = [
        SLOWER[replica] * (START + STEP * steps + TOKEN * tokens + KV * kv)
        for steps, tokens, kv in work_before(lengths, of)
    ]
    return MeasuredBatch(replica, max(ends), tuple(zip(lengths, ends, strict=True)))


def made_up_run(folder: Path, steps: int = 12, growth: float = 0.0) -> tuple[Run, RunConfig]:
    """A synchronous run on two replicas of unequal speed whose every second is known. Responses grow by
    `growth` of what they were at first with each step."""
    config = load_config(
        ["experiment=demo", "pipeline=sync", f"run_dir={folder}", "rollout.replicas=2", "dry_run=true"]
    )
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 8, 4
    noise, now, consumed, records, relays = random.Random(1), 100.0, [], [], []
    spans: dict[str, list[TraceSpan]] = {"rollout0": [], "rollout1": []}
    for step in range(steps):
        began = now
        grown = 1.0 + growth * step
        lengths = [round(min(256, grown * noise.lognormvariate(4, 0.8))) + 1 for _ in range(32)]
        generating = now + RELAY + PULL if step else now
        ends = []
        for replica in (0, 1):
            batch = batch_of(lengths[replica * 16 :][:16], queue(), replica)
            if step:
                spans[f"rollout{replica}"].append(TraceSpan("pull", now + RELAY, generating, {}))
            fields = {"trajectories": 16}
            spans[f"rollout{replica}"].append(
                TraceSpan("generate", generating, generating + batch.seconds, fields)
            )
            ends.append(generating + batch.seconds)
            for length, seconds in batch.ends:
                i, finished_at = len(consumed), generating + seconds
                consumed.append(
                    Consumed(
                        i,
                        i // 4,
                        replica,
                        step,
                        step,
                        step,
                        step,
                        length,
                        0.0,
                        0.0,
                        "stop",
                        "",
                        generating,
                        finished_at,
                        finished_at,
                    )
                )
        tokens = sum(lengths) + 32 * PROMPT
        training = TRAIN_STEP + TRAIN_TOKEN * tokens
        now = max(ends) + training + PUBLISH
        records.append(
            {
                "step": step + 1,
                "time": now,
                "seconds": now - began,
                "wait_seconds": max(ends) - began,
                "train_seconds": training,
                "prompt_tokens": 32 * PROMPT,
                "response_tokens": sum(lengths),
                "trajectories": 32,
                "staleness_training_mean": 0.0,
            }
        )
        relays.append({"step": step + 1, "time": now + RELAY})
    launch = RunLaunch(0.0, now, None, "sync", {}, steps=records)
    run = Run(folder, dataclasses.asdict(config), [launch], [], 0, {"relay": relays}, spans, consumed)
    return run, config
