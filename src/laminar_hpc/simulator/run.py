"""One simulated run: hardware, model, workload and rules in; figures, ledgers and time lines out."""

import dataclasses
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from laminar_hpc.policies.repack import saturation_batch
from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.constants import Constants, Gpu, Model
from laminar_hpc.simulator.cost import (
    EngineCosts,
    JobCosts,
    Layout,
    engine_costs,
    faster,
    job_costs,
    kv_capacity,
    trainer_layout,
)
from laminar_hpc.simulator.fleet_moves import Failures, Repacker
from laminar_hpc.simulator.replica import Replica
from laminar_hpc.simulator.request import Admission
from laminar_hpc.simulator.rollouts import Rollouts
from laminar_hpc.simulator.rules import Rules
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.tracker import TrajectoryTracker
from laminar_hpc.simulator.trainer import Trainer
from laminar_hpc.simulator.workload import Workload

_SHOWN_REPLICAS = 8  # in the time line
_SAMPLE_SECONDS = 5.0  # between samples of KV use, with `watch`
IDLE = ("admission", "barrier", "weights", "environment", "move", "pull", "down")


@dataclass(frozen=True)
class Engines:
    """Replicas of one kind. `mtbf`: mean seconds between failures or preemptions of one; None = never."""

    count: int
    gpus: int
    costs: EngineCosts
    capacity: int
    saturation: int
    mtbf: float | None = None


@dataclass(frozen=True)
class Setup:
    """A whole run, in seconds and tokens."""

    rules: Rules
    engines: tuple[Engines, ...]
    job: JobCosts
    trainer_gpus: int
    layout: Layout
    workload: WorkloadConfig
    steps: int
    warmup_steps: int
    admission: Admission
    seed: int = 0
    max_concurrent: int = 256
    repack_kv_share: float = 0.9
    checkpoint_every: int = 20
    trainer_mtbf: float | None = None
    # local batches of all replicas are equal, as in a live run; else each is by its replica's rate
    equal_batches: bool = False
    watch: bool = False  # keep time lines and samples for the report

    def faster(self, factor: float) -> "Setup":
        """The same run with all rates `factor` times as high."""
        kinds = tuple(
            dataclasses.replace(kind, costs=faster(kind.costs, factor), mtbf=kind.mtbf and kind.mtbf / factor)
            for kind in self.engines
        )
        mtbf = self.trainer_mtbf and self.trainer_mtbf / factor
        return dataclasses.replace(self, engines=kinds, job=faster(self.job, factor), trainer_mtbf=mtbf)


@dataclass
class Outcome:
    """Figures of the window after the warm-up; see docs/simulator.md. `gpu_seconds`: by role and cause."""

    figures: dict[str, float]
    gpu_seconds: dict[str, dict[str, float]]
    staleness_generation: dict[int, int]
    staleness_training: dict[int, int]
    spans: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    kv_samples: list[tuple[float, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


def engines(
    model: Model, gpu: Gpu, gpus: int, tensor_parallel: int, mtbf: float | None, colocated: bool, c: Constants
) -> Engines:
    """As many replicas as `gpus` hold."""
    share = c.kv_memory_share_colocated if colocated else c.kv_memory_share
    return Engines(
        count=gpus // tensor_parallel,
        gpus=tensor_parallel,
        costs=engine_costs(model, gpu, tensor_parallel, c),
        capacity=kv_capacity(model, gpu, tensor_parallel, share),
        saturation=saturation_batch(gpu.flops, gpu.hbm),
        mtbf=mtbf,
    )


def setup(
    rules: Rules,
    model: Model,
    trainer_gpu: Gpu,
    trainer_gpus: int,
    rollouts: Sequence[tuple[Gpu, int, int, float | None]],
    workload: WorkloadConfig,
    c: Constants,
    engine: str = "sglang",
    layout: Layout | None = None,
    **settings: Any,
) -> Setup:
    """`rollouts`: (type, GPUs, tensor parallel, seconds between failures of a replica); colocated: the same
    GPUs as the trainer's. `layout`: the trainer's, None = that of a published system."""
    colocated = rules.placement == "colocated"
    kinds = tuple(
        engines(model, gpu, gpus, tp, mtbf, colocated, c) for gpu, gpus, tp, mtbf in rollouts if gpus >= tp
    )
    total = sum(gpus for _, gpus, *_ in rollouts)
    # Where the optimizer does not fit it is offloaded, at no cost here: one copy of the model on all GPUs.
    layout = layout or trainer_layout(model, trainer_gpu, trainer_gpus, c) or Layout(trainer_gpus, 1, 1)
    job = job_costs(model, trainer_gpu, trainer_gpus, layout, total, workload.max_response_tokens, c)
    return Setup(
        rules,
        kinds,
        job,
        trainer_gpus,
        layout,
        workload,
        admission=Admission.of(workload.max_response_tokens, c, engine),
        repack_kv_share=c.repack_kv_share,
        **settings,
    )


class _Window:
    """Ledgers at the end of the warm-up, subtracted at the end."""

    def __init__(
        self,
        replicas: list[Replica],
        trainer: Trainer,
        tracker: TrajectoryTracker,
        latencies: Sequence[float],
        clock: Clock,
    ) -> None:
        for replica in replicas:
            replica.advance(clock.now)
        self.start = clock.now
        self.seconds = [dict(replica.seconds) for replica in replicas]
        self.kv = [replica.kv_seconds for replica in replicas]
        self.busy = [replica.request_seconds for replica in replicas]
        self.generated = sum(replica.generated for replica in replicas)
        self.trainer = dict(trainer.seconds)
        self.waiting = clock.now - trainer.waiting_since if trainer.waiting_since is not None else 0.0
        self.generation, self.training = (
            tracker.generation_staleness.copy(),
            tracker.training_staleness.copy(),
        )
        self.finished = len(latencies)


def _replicas(setup: Setup) -> tuple[list[Replica], list[float]]:
    """All replicas and the share of a batch that each one's local batch is: by its rate at a full batch."""
    made: list[Replica] = []
    weights: list[float] = []
    mean = setup.workload.prompt_tokens + setup.workload.mean_response_tokens / 2
    for kind in setup.engines:
        batch = max(1.0, min(setup.max_concurrent, kind.capacity / mean))
        rate = batch / kind.costs.step(batch, batch * mean)
        for _ in range(kind.count):
            made.append(
                Replica(
                    len(made),
                    kind.costs,
                    kind.capacity,
                    setup.max_concurrent,
                    setup.admission,
                    kind.gpus,
                    kind.mtbf,
                )
            )
            weights.append(1.0 if setup.equal_batches else rate)
    return made, [w / sum(weights) for w in weights]


def simulate(setup: Setup) -> Outcome:
    """Runs `setup.steps` trainer steps. The garbage collector is off meanwhile: nothing here makes cycles
    that matter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _simulate(setup)
    finally:
        if enabled:
            gc.enable()


def _simulate(setup: Setup) -> Outcome:
    w, rules = setup.workload, setup.rules
    clock, tracker = Clock(), TrajectoryTracker(Workload(w, setup.seed, w.prompts_per_step * setup.steps))
    trainer = Trainer(
        clock,
        tracker,
        setup.job,
        rules,
        w.prompts_per_step,
        w.updates_per_step,
        setup.steps,
        setup.checkpoint_every,
        setup.layout,
        setup.seed,
    )
    replicas, shares = _replicas(setup)
    rollouts = Rollouts(clock, tracker, trainer, replicas, rules, w.prompts_per_step, w.turn_tokens, shares)
    repacker = Repacker(rollouts, setup.repack_kv_share, min(kind.saturation for kind in setup.engines))
    failures = Failures(rollouts, setup.seed, setup.trainer_mtbf)
    windows: list[_Window] = []

    def on_step(step: int) -> None:
        clock.progress()
        if step == setup.warmup_steps:
            windows.append(_Window(replicas, trainer, tracker, rollouts.latencies, clock))
        if rules.repack != "off" and step < setup.steps:
            repacker.look()

    trainer.on_step = on_step
    if setup.warmup_steps == 0:
        windows.append(_Window(replicas, trainer, tracker, rollouts.latencies, clock))
    samples: list[tuple[float, float]] = []
    if setup.watch:
        for replica in replicas[:_SHOWN_REPLICAS]:
            replica.spans = []
        clock.at(0.0, _sample, clock, replicas, samples)
    rollouts.start()
    if rules.repack != "off":
        clock.after(setup.job.repack_period, repacker.tick)
    clock.run()
    for replica in replicas:
        replica.advance(clock.now)
    outcome = _outcome(setup, clock, tracker, trainer, replicas, rollouts, windows[0])
    outcome.figures |= {
        "replicas_emptied": repacker.replicas_emptied,
        "trajectories_moved": repacker.trajectories_moved,
        "move_seconds_mean": repacker.move_seconds / repacker.replicas_emptied
        if repacker.replicas_emptied
        else 0.0,
        "replica_deaths": failures.replica_deaths,
        "trainer_deaths": failures.trainer_deaths,
        "trajectories_redirected": failures.redirected,
        "trajectories_rescued_by_load": failures.loaded,
        "trajectories_restarted": failures.restarted,
    }
    if setup.watch:
        outcome.spans = {
            "trainer": trainer.spans,
            **{f"rollout{r.index}": r.spans or [] for r in replicas[:_SHOWN_REPLICAS]},
        }
        outcome.kv_samples = samples
        outcome.lengths = [n for i in range(min(256, tracker.counted)) for n in tracker.workload.lengths(i)]
    return outcome


def _sample(clock: Clock, replicas: list[Replica], samples: list[tuple[float, float]]) -> None:
    used = 0.0
    for replica in replicas:
        replica.advance(clock.now)
        used += replica.kv / replica.capacity
    samples.append((clock.now, used / len(replicas)))
    clock.after(_SAMPLE_SECONDS, _sample, clock, replicas, samples)


def _outcome(
    setup: Setup,
    clock: Clock,
    tracker: TrajectoryTracker,
    trainer: Trainer,
    replicas: list[Replica],
    rollouts: Rollouts,
    window: _Window,
) -> Outcome:
    skip = setup.warmup_steps
    begin = trainer.step_ends[skip - 1] if skip else 0.0
    length = clock.now - begin
    tokens = sum(trainer.step_tokens[skip:])
    seconds: dict[str, float] = {}
    for replica, before in zip(replicas, window.seconds, strict=True):
        for kind, value in replica.seconds.items():
            seconds[kind] = seconds.get(kind, 0.0) + (value - before.get(kind, 0.0)) * replica.gpus
    trained = {kind: value - window.trainer.get(kind, 0.0) for kind, value in trainer.seconds.items()}
    gpu_seconds = {"rollout": seconds}
    if setup.rules.placement == "split":
        gpu_seconds["trainer"] = {kind: value * setup.trainer_gpus for kind, value in trained.items()}
    gpus = sum(r.gpus for r in replicas) + (setup.trainer_gpus if setup.rules.placement == "split" else 0)
    kv = sum(r.kv_seconds - before for r, before in zip(replicas, window.kv, strict=True))
    generation = tracker.generation_staleness - window.generation
    training = tracker.training_staleness - window.training
    latencies = np.array(rollouts.latencies[window.finished :] or [0.0])
    admitted = np.array(rollouts.admitted_latencies[window.finished :] or [0.0])
    idle = sum(value for kind, value in seconds.items() if kind in IDLE)
    steps = len(trainer.step_ends) - skip
    figures = {
        "tokens_per_second": tokens / length,
        "step_seconds": length / steps,
        "tokens_per_step": tokens / steps,
        "gpus": gpus,
        "trainer_gpus": setup.trainer_gpus,
        "replicas": len(replicas),
        "trainer_wait_share": trained.get("wait", 0.0) / length,
        "rollout_idle_share": idle / sum(seconds.values()),
        "kv_use": kv / (length * sum(r.capacity for r in replicas)),
        "requests_mean": sum(r.request_seconds - b for r, b in zip(replicas, window.busy, strict=True))
        / (length * len(replicas)),
        "latency_mean": float(latencies.mean()),
        "latency_max": float(latencies.max()),
        "latency_admitted_mean": float(admitted.mean()),
        "latency_admitted_max": float(admitted.max()),
        "staleness_generation_mean": _mean(generation),
        "staleness_generation_max": max(generation, default=0),
        "staleness_training_mean": _mean(training),
        "staleness_training_max": max(training, default=0),
        "versions_max": tracker.versions,
        "preemptions": sum(r.preemptions for r in replicas),
        "discarded_tokens": tracker.discarded_tokens,
        "generated_per_second": (sum(r.generated for r in replicas) - window.generated) / length,
        "generated_tokens": sum(r.generated for r in replicas),
        "finished_tokens": tracker.finished_tokens,
        "finished_trajectories": sum(tracker.generation_staleness.values()),
        "prefilled_tokens": sum(r.prefilled for r in replicas),
        "events": clock.calls,
        "seconds": clock.now,
    }
    return Outcome(figures, gpu_seconds, dict(sorted(generation.items())), dict(sorted(training.items())))


def _mean(counts: dict[int, int]) -> float:
    total = sum(counts.values())
    return sum(k * n for k, n in counts.items()) / total if total else math.nan
