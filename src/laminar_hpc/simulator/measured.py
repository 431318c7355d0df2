"""A finished live run as a simulation: its config, its lengths, and costs measured in the same run; predicts
its rates and idle shares.

Measured are the decode curve (time of a local batch = a + b * decode steps + c * tokens, least squares over
the run's local batches), the trainer's seconds per token, and the means of publication, send and pull.
Waiting, overlap, staleness and throughput are predicted.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.observability.trace import Span
from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import EngineCosts, JobCosts, Layout
from laminar_hpc.simulator.request import Admission
from laminar_hpc.simulator.rules import Rules
from laminar_hpc.simulator.run import Engines, Setup
from laminar_hpc.simulator.schema import WorkloadConfig

WARMUP_STEPS = 2
_LEAST_BATCHES = 6  # local batches that a curve of three numbers is taken from


@dataclass(frozen=True)
class DecodeCurve:
    """Seconds of a local batch: `start` + `step` per decode step + `token` per generated token."""

    start: float
    step: float
    token: float


def decode_curve(batches: Sequence[tuple[float, int, int]]) -> DecodeCurve:
    """From (seconds, longest response, tokens) of local batches; coefficients that come out negative are left
    out of the fit."""
    seconds = np.array([row[0] for row in batches])
    columns = np.array([[1.0, row[1], row[2]] for row in batches])
    kept = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(columns[:, kept], seconds, rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            values = dict(zip(kept, np.maximum(found, 0.0), strict=True))
            return DecodeCurve(*(float(values.get(i, 0.0)) for i in range(3)))
        kept.pop(int(np.argmin(found)))


def local_batches(run: Run) -> list[tuple[float, int, int]]:
    """(seconds, longest response, tokens) of each local batch after the first, by the rollouts' `generate`
    spans."""
    found = []
    for name, spans in run.spans.items():
        if not name.startswith("rollout"):
            continue
        replica = int(name.removeprefix("rollout"))
        mine = sorted((t.time_finished, t.response_length) for t in run.consumed if t.replica == replica)
        for span in [span for span in spans if span.kind == "generate"][1:]:
            lengths = [length for finished, length in mine if span.t0 < finished <= span.t1 + 0.05]
            if lengths:
                found.append((span.t1 - span.t0, max(lengths), sum(lengths)))
    return found


def _mean_seconds(run: Run, role: str, kind: str) -> float:
    spans: list[Span] = [
        span
        for name, found in run.spans.items()
        if name.startswith(role)
        for span in found
        if span.kind == kind
    ]
    return statistics.fmean(span.t1 - span.t0 for span in spans[1:]) if len(spans) > 1 else 0.0


def setup_of(run_dir: Path) -> Setup:
    """The simulation of the run in `run_dir`. Raises LaminarError when it is too short to measure a decode
    curve from."""
    run = rundata.load(run_dir)
    c, steps = run.config, run.steps
    batches = local_batches(run)
    if len(batches) < _LEAST_BATCHES or len(steps) <= WARMUP_STEPS + 2:
        raise LaminarError(
            f"{run_dir}: {len(batches)} traced local batches and "
            f"{len(steps)} steps are too few; let it run for longer"
        )
    curve = decode_curve(batches)
    replicas, groups, samples = (
        c["rollout"]["replicas"],
        c["algorithm"]["prompts_per_step"],
        c["algorithm"]["samples_per_prompt"],
    )
    prompt_tokens = round(statistics.fmean(step["prompt_tokens"] / step["trajectories"] for step in steps))
    trained = [s.t1 - s.t0 for s in run.spans["trainer0"] if s.kind == "train"]
    tokens = [step["prompt_tokens"] + step["response_tokens"] for step in steps]
    tiny = 1e-9  # this model's step time has no part for KV: a + N * compute
    local = -(-groups // replicas)
    engine = EngineCosts(
        overhead=curve.step,
        weights=tiny,
        kv_token=tiny * tiny,
        compute=max(curve.token, tiny),
        prefill_token=curve.start / (local * prompt_tokens),
        pull=_mean_seconds(run, "rollout", "pull"),
        global_sync=0.0,
        move_token=0.0,
        move_latency=0.0,
        restart=0.0,
        prefill_attention=0.0,
    )
    publish, send = _mean_seconds(run, "trainer", "publish"), _mean_seconds(run, "trainer", "send")
    job = JobCosts(
        train_token=sum(trained[1:]) / sum(tokens[1 : len(trained)]),
        train_attention=0.0,
        logprob_token=0.0,
        logprob_attention=0.0,
        handling=0.0,
        update=0.0,
        publish_stall=publish,
        chain=send,
        switch=0.0,
        checkpoint=0.0,
        job_restart=0.0,
        repack_period=1.0,
    )
    rules = Rules(c["pipeline"]["refresh"], c["pipeline"]["max_staleness"], relays=True, isolated=True)
    work = WorkloadConfig(
        prompts_per_step=groups,
        samples_per_prompt=samples,
        updates_per_step=c["algorithm"]["minibatches_per_step"],
        prompt_tokens=prompt_tokens,
        max_response_tokens=c["sampling"]["max_response_tokens"],
        lengths_file=str(run.store),
    )
    kind = Engines(replicas, 1, engine, c["rollout"]["kv_cache_tokens"], 1 << 30)
    return Setup(
        rules,
        (kind,),
        job,
        1,
        Layout(1, 1, c["trainer"]["data_parallel"]),
        work,
        steps=len(steps),
        warmup_steps=WARMUP_STEPS,
        admission=Admission.of(work.max_response_tokens, DEFAULT),
        max_concurrent=c["rollout"]["max_concurrent"],
        checkpoint_every=1 << 30,
    )
