"""One simulated run: a setup in; figures, ledgers and time lines out."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from laminar_hpc.machine.collector import without_collector
from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.cost import faster
from laminar_hpc.simulator.fleet_moves import Failures, SimulatedRepacker
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.rollouts import Rollouts
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.tracker import SimulatedTracker
from laminar_hpc.simulator.trainer import Trainer
from laminar_hpc.simulator.workload import Workload

_SHOWN_REPLICAS = 8  # in the time line
_SAMPLE_SECONDS = 5.0  # between samples of KV use, with `watch`
IDLE = ("admission", "barrier", "weights", "environment", "move", "pull", "down")


@dataclass
class SimulationOutcome:
    """Figures of the window after the warm-up; see docs/simulator.md. `gpu_seconds`: by role and cause."""

    figures: dict[str, float]
    gpu_seconds: dict[str, dict[str, float]]
    staleness_generation: dict[int, int]
    staleness_training: dict[int, int]
    spans: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    kv_samples: list[tuple[float, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class _Window:
    """Ledgers at the end of the warm-up, subtracted at the end."""

    def __init__(self, run: "Simulation") -> None:
        run.advance()
        tracker = run.tracker
        self.seconds = [dict(replica.seconds) for replica in run.replicas]
        self.kv = [replica.kv_seconds for replica in run.replicas]
        self.busy = [replica.request_seconds for replica in run.replicas]
        self.generated = sum(replica.generated for replica in run.replicas)
        self.trainer = dict(run.trainer.seconds)
        self.generation = tracker.generation_staleness.copy()
        self.training = tracker.training_staleness.copy()
        self.ended = len(tracker.ended)
        self.spent = dataclasses.replace(run.rollouts.turns.environments.spent)


def _replicas(setup: SimulationSetup) -> tuple[list[SimulatedReplica], list[float]]:
    """All replicas and the share of a batch that each one's local batch is: by its kind's
    rate at a full batch. How fast each one of a kind is nobody knows before."""
    made: list[SimulatedReplica] = []
    weights: list[float] = []
    random = np.random.default_rng([setup.seed, 2])
    mean = setup.workload.prompt_tokens + setup.workload.mean_response_tokens / 2
    for kind in setup.engines:
        batch = max(1.0, min(setup.max_concurrent, kind.capacity / mean))
        rate = batch / kind.costs.step(batch, batch * mean)
        for speed in np.exp(setup.speed_spread * random.standard_normal(kind.count)).tolist():
            made.append(
                SimulatedReplica(
                    len(made),
                    faster(kind.costs, speed),
                    kind.capacity,
                    setup.max_concurrent,
                    setup.admission,
                    kind.gpus,
                    kind.mtbf,
                    kind.site,
                    kind.grace,
                )
            )
            weights.append(1.0 if setup.equal_batches else rate)
    return made, [w / sum(weights) for w in weights]


def simulate(setup: SimulationSetup) -> SimulationOutcome:
    """Runs `setup.steps` trainer steps, without the garbage collector: nothing here makes large cycles."""
    with without_collector():
        simulation = Simulation(setup)
        simulation.clock.run()
        return simulation.outcome()


class Simulation:
    """One trainer with its rollouts and a clock of its own. Made, it has its first events; `clock.run()` runs
    it to its last step."""

    def __init__(self, setup: SimulationSetup) -> None:
        self.setup = setup
        w = setup.workload
        work = Workload(w, setup.seed, w.prompts_per_step * setup.steps, setup.lengths, setup.known)
        self.clock = Clock()
        self.tracker = SimulatedTracker(work, setup.rules.dispatch)
        self.trainer = Trainer(self.clock, self.tracker, setup)
        self.replicas, shares = _replicas(setup)
        self.rollouts = Rollouts(self.clock, self.tracker, self.trainer, self.replicas, setup, shares)
        self.tracker.play = self.rollouts.play_of
        self.repacker = SimulatedRepacker(self.rollouts, setup)
        self.failures = Failures(self.rollouts, setup)
        self.window: _Window
        self.samples: list[tuple[float, float]] = []
        self.trainer.on_step = self._on_step
        if setup.warmup_steps == 0:
            self.window = _Window(self)
        if setup.watch:
            for replica in self.replicas[:_SHOWN_REPLICAS]:
                replica.spans = []
            self._sample_at(0.0)
        if setup.rules.empties:
            self.repacker.look_again()
        self.rollouts.start()

    def advance(self) -> float:
        """Brings all replicas to now, which it gives."""
        for replica in self.replicas:
            replica.advance(self.clock.now)
        return self.clock.now

    def _on_step(self, step: int) -> None:
        self.clock.progress()
        if step == self.setup.warmup_steps:
            self.window = _Window(self)
        if self.setup.rules.empties and step < self.setup.steps:
            self.repacker.look()

    def _sample_at(self, time: float) -> None:
        self.rollouts.appointments.add(time)
        self.clock.at(time, self._sample)

    def _sample(self) -> None:
        now = self.advance()
        used = 0.0
        for replica in self.replicas:
            used += replica.kv / replica.capacity
        self.samples.append((now, used / len(self.replicas)))
        self._sample_at(now + _SAMPLE_SECONDS)

    def outcome(self) -> SimulationOutcome:
        """The figures of the window, once the last step is trained."""
        now, tracker, window = self.advance(), self.tracker, self.window
        generation = tracker.generation_staleness - window.generation
        training = tracker.training_staleness - window.training
        gpu_seconds = {"rollout": _rollout_seconds(self)}
        before = window.trainer
        trained = {kind: value - before.get(kind, 0.0) for kind, value in self.trainer.seconds.items()}
        if self.setup.rules.placement == "split":
            gpus = self.setup.trainer_gpus
            gpu_seconds["trainer"] = {kind: value * gpus for kind, value in trained.items()}
        figures = {
            **_rates(self, trained.get("wait", 0.0), gpu_seconds["rollout"]),
            **_latencies(tracker, window.ended),
            **_staleness("generation", generation),
            **_staleness("training", training),
            "versions_max": tracker.versions,
            "site_copy_seconds_max": max(
                (site.latency + site.copy for site in self.setup.sites), default=0.0
            ),
            "discarded_tokens": tracker.discarded_tokens,
            "finished_tokens": tracker.finished_tokens,
            "finished_trajectories": sum(tracker.generation_staleness.values()),
            "events": self.clock.calls,
            "seconds": now,
            **_move_figures(self.repacker, self.failures, self.rollouts),
        }
        if self.setup.several:
            figures |= self.rollouts.turns.environments.spent.means(window.spent)
        counts = [dict(sorted(count.items())) for count in (generation, training)]
        outcome = SimulationOutcome(figures, gpu_seconds, counts[0], counts[1])
        if self.setup.watch:
            shown = {f"rollout{r.index}": r.spans or [] for r in self.replicas[:_SHOWN_REPLICAS]}
            outcome.spans = {"trainer": self.trainer.spans, **shown}
            outcome.kv_samples = self.samples
            groups = range(min(256, tracker.counted))
            outcome.lengths = [n for i in groups for n in tracker.workload.lengths(i)]
        return outcome


def _rates(run: Simulation, waited: float, gpu_seconds: dict[str, float]) -> dict[str, float]:
    """Of the window, in which the trainer has waited for `waited` seconds."""
    setup, window, replicas, skip = run.setup, run.window, run.replicas, run.setup.warmup_steps
    length = run.clock.now - (run.trainer.step_ends[skip - 1] if skip else 0.0)
    tokens, steps = sum(run.trainer.step_tokens[skip:]), len(run.trainer.step_ends) - skip
    kv = sum(r.kv_seconds - before for r, before in zip(replicas, window.kv, strict=True))
    busy = sum(r.request_seconds - before for r, before in zip(replicas, window.busy, strict=True))
    idle = sum(value for kind, value in gpu_seconds.items() if kind in IDLE)
    generated = sum(r.generated for r in replicas)
    trainer_gpus = setup.trainer_gpus if setup.rules.placement == "split" else 0
    return {
        "tokens_per_second": tokens / length,
        "step_seconds": length / steps,
        "tokens_per_step": tokens / steps,
        "gpus": sum(r.gpus for r in replicas) + trainer_gpus,
        "trainer_gpus": setup.trainer_gpus,
        "trainer_wait_share": waited / length,
        "replicas": len(replicas),
        "rollout_idle_share": idle / sum(gpu_seconds.values()),
        "kv_use": kv / (length * sum(r.capacity for r in replicas)),
        "requests_mean": busy / (length * len(replicas)),
        "preemptions": sum(r.preemptions for r in replicas),
        "generated_per_second": (generated - window.generated) / length,
        "generated_tokens": generated,
        "prefilled_tokens": sum(r.prefilled for r in replicas),
    }


def _move_figures(repacker: SimulatedRepacker, failures: Failures, rollouts: Rollouts) -> dict[str, float]:
    emptied, deliveries = repacker.replicas_emptied, rollouts.deliveries.seconds
    return {
        "replicas_emptied": emptied,
        "trajectories_moved": repacker.trajectories_moved,
        "move_seconds_mean": repacker.move_seconds / emptied if emptied else 0.0,
        "replica_deaths": failures.replica_deaths,
        "trainer_deaths": failures.trainer_deaths,
        "trajectories_redirected": failures.redirected,
        "trajectories_rescued_by_load": failures.loaded,
        "trajectories_restarted": failures.restarted,
        "notices": failures.hand_over.notices,
        "trajectories_handed_over": failures.hand_over.handed_over,
        "site_delivery_seconds_mean": sum(deliveries) / len(deliveries) if deliveries else 0.0,
    }


def _rollout_seconds(run: Simulation) -> dict[str, float]:
    """GPU seconds of all replicas in the window, by cause."""
    seconds: dict[str, float] = {}
    for replica, before in zip(run.replicas, run.window.seconds, strict=True):
        for kind, value in replica.seconds.items():
            seconds[kind] = seconds.get(kind, 0.0) + (value - before.get(kind, 0.0)) * replica.gpus
    return seconds


def _latencies(tracker: SimulatedTracker, first: int) -> dict[str, float]:
    """Of the trajectories from the `first` one on, in the order of their ends."""
    order = np.argsort(np.array(tracker.ended[first:]), kind="stable")
    figures: dict[str, float] = {}
    for name, seconds in (("latency", tracker.latencies), ("latency_admitted", tracker.admitted_latencies)):
        values = np.array(seconds[first:])[order] if len(order) else np.zeros(1)
        figures |= {f"{name}_mean": float(values.mean()), f"{name}_max": float(values.max())}
    return figures


def _staleness(name: str, counts: dict[int, int]) -> dict[str, float]:
    total = sum(counts.values())
    mean = sum(k * n for k, n in counts.items()) / total if total else 0.0
    return {f"staleness_{name}_mean": mean, f"staleness_{name}_max": max(counts, default=0)}
