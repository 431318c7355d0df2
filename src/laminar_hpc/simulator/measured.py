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
from laminar_hpc.simulator.cost import EngineCosts
from laminar_hpc.simulator.request import Admission
from laminar_hpc.simulator.rules import Rules
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import Engines, Setup
from laminar_hpc.simulator.trainer_cost import JobCosts, Layout

WARMUP_STEPS = 2
_MIN_BATCHES = 6  # local batches that a curve of three numbers is taken from


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
        coefficients = np.linalg.lstsq(columns[:, kept], seconds, rcond=None)[0]
        if (coefficients >= 0).all() or len(kept) == 1:
            values = dict(zip(kept, np.maximum(coefficients, 0.0), strict=True))
            return DecodeCurve(*(float(values.get(i, 0.0)) for i in range(3)))
        kept.pop(int(np.argmin(coefficients)))


def local_batches(run: Run) -> list[tuple[float, int, int]]:
    """(seconds, longest response, tokens) of each local batch after the first, by the rollouts' `generate`
    spans."""
    batches = []
    for name, spans in run.spans.items():
        if not name.startswith("rollout"):
            continue
        replica = int(name.removeprefix("rollout"))
        mine = sorted((t.time_finished, t.response_length) for t in run.consumed if t.replica == replica)
        for span in [span for span in spans if span.kind == "generate"][1:]:
            lengths = [length for finished, length in mine if span.t0 < finished <= span.t1 + 0.05]
            if lengths:
                batches.append((span.t1 - span.t0, max(lengths), sum(lengths)))
    return batches


def _mean_seconds(run: Run, role: str, kind: str) -> float:
    spans: list[Span] = [
        span
        for name, of_role in run.spans.items()
        if name.startswith(role)
        for span in of_role
        if span.kind == kind
    ]
    return statistics.fmean(span.t1 - span.t0 for span in spans[1:]) if len(spans) > 1 else 0.0


def setup_of(run_dir: Path) -> Setup:
    """The simulation of the run in `run_dir`. Raises LaminarError when it is too short to measure a decode
    curve from."""
    run = rundata.load(run_dir)
    c, steps = run.config, run.steps
    batches = local_batches(run)
    if len(batches) < _MIN_BATCHES or len(steps) <= WARMUP_STEPS + 2:
        raise LaminarError(
            f"{run_dir}: {len(batches)} traced local batches and "
            f"{len(steps)} steps are too few; let it run for longer"
        )
    work = _workload(run)
    replicas = c["rollout"]["replicas"]
    local_batch_tokens = -(-work.prompts_per_step // replicas) * work.prompt_tokens
    costs = _engine_costs(run, decode_curve(batches), local_batch_tokens)
    return Setup(
        Rules(c["pipeline"]["refresh"], c["pipeline"]["max_staleness"], relays=True, isolated=True),
        (Engines(replicas, 1, costs, c["rollout"]["kv_cache_tokens"], 1 << 30),),
        _job_costs(run),
        1,
        Layout(1, 1, c["trainer"]["data_parallel"]),
        work,
        steps=len(steps),
        warmup_steps=WARMUP_STEPS,
        admission=Admission.of(work.max_response_tokens, DEFAULT),
        max_concurrent=c["rollout"]["max_concurrent"],
        checkpoint_every=1 << 30,
    )


def _workload(run: Run) -> WorkloadConfig:
    c = run.config
    return WorkloadConfig(
        prompts_per_step=c["algorithm"]["prompts_per_step"],
        samples_per_prompt=c["algorithm"]["samples_per_prompt"],
        updates_per_step=c["algorithm"]["minibatches_per_step"],
        prompt_tokens=round(
            statistics.fmean(step["prompt_tokens"] / step["trajectories"] for step in run.steps)
        ),
        max_response_tokens=c["sampling"]["max_response_tokens"],
        lengths_file=str(run.store),
    )


def _engine_costs(run: Run, curve: DecodeCurve, local_batch_tokens: int) -> EngineCosts:
    """`local_batch_tokens`: prompt tokens of a replica's local batch, one sample per prompt."""
    return EngineCosts(
        overhead=max(curve.step, 1e-9),
        weights=0.0,
        kv_token=0.0,
        compute=0.0,
        request=curve.token,  # this model's step time has no part for KV: step + N * token
        prefill_token=curve.start / local_batch_tokens,
        pull=_mean_seconds(run, "rollout", "pull"),
        global_sync=0.0,
        move_token=0.0,
        move_latency=0.0,
        restart=0.0,
        prefill_attention=0.0,
    )


def _job_costs(run: Run) -> JobCosts:
    trained = [s.t1 - s.t0 for s in run.spans["trainer0"] if s.kind == "train"]
    tokens = [step["prompt_tokens"] + step["response_tokens"] for step in run.steps]
    return JobCosts(
        train_token=sum(trained[1:]) / sum(tokens[1 : len(trained)]),
        train_attention=0.0,
        logprob_token=0.0,
        logprob_attention=0.0,
        handling=0.0,
        overlapped_handling=0.0,
        update=0.0,
        publish_stall=_mean_seconds(run, "trainer", "publish"),
        chain=_mean_seconds(run, "trainer", "send"),
        switch=0.0,
        checkpoint=0.0,
        job_restart=0.0,
        repack_period=1.0,
    )
