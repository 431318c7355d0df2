"""All that Prometheus is given of a run, from its files as report/live.py follows them.

The names are those of docs/metrics.md behind `laminar_`, with Prometheus' endings; each series has the label
`run`, the name of the run's folder. Replicas have series of their own up to REPLICAS_SHOWN; sums over all
replicas are there at any number. Nothing of prompts, responses, hosts, keys or paths is given.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.report.live import SILENT_SECONDS, RunFollower, View
from laminar_hpc.report.prometheus.gauges import GAUGES, LOADS, RECENT
from laminar_hpc.report.prometheus.totals import COUNTERS, HISTOGRAMS, RunTotals, step_figures
from laminar_hpc.store.status import RankStatus, Status

REPLICAS_SHOWN = 128  # with series of their own, those with the lowest numbers
_LOOK_SECONDS = 0.5  # scrapes that come faster get the same figures
_STATES = ("unverified", "pulling", "verified", "open", "draining", "silent")
_RUN_STATES = ("starting", "going on", "ended", "died")
_RENAMED = {"reward_error_count": "reward_errors"}  # _count is for histograms
Family = TypeVar("Family")


class RunCollector:
    """Collects the figures of a run; Prometheus' client calls `collect`. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._totals = RunTotals()
        self._follower: RunFollower | None = None
        self._looked = 0.0
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """The figures of now; the state alone while the run has no files yet."""
        with self._lock:
            view = self._look()
            exposition = Exposition(self._run_dir.resolve().name)
            _run(exposition, view)
            _steps(exposition, view)
            _records(exposition, view, self._totals)
            if view.status and view.state == "going on":
                _queues(exposition, view.status)
                _replicas(exposition, view.status, self._totals)
        yield from exposition.families.values()

    def _look(self) -> View:
        if self._follower is None:
            try:
                self._follower = RunFollower(self._run_dir, self._totals.hear)
            except LaminarError:  # no file yet
                return View(self._run_dir)
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._follower.look(traces=False)
            self._looked = time.monotonic()
        return self._follower.view


class Exposition:
    """The families of one scrape. A value of None is left out."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.families: dict[str, Any] = {}

    def gauge(self, name: str, value: float | None, /, **labels: object) -> None:
        """One series of one of GAUGES."""
        if value is not None:
            family = self._family(GaugeMetricFamily, name, GAUGES[name], labels)
            family.add_metric([self._run, *map(str, labels.values())], value)

    def step(self, name: str, field: str, value: float) -> None:
        """A number of the newest step's record."""
        about = f"{field} of the newest trainer step, see docs/metrics.md"
        self._family(GaugeMetricFamily, f"step_{name}", about, {}).add_metric([self._run], value)

    def counter(self, name: str, about: str, value: float) -> None:
        """A counter, which Prometheus calls NAME_total."""
        self._family(CounterMetricFamily, name, about, {}).add_metric([self._run], value)

    def histogram(self, name: str, about: str, buckets: list[tuple[str, float]], total: float) -> None:
        """A histogram from (upper bound, observations up to it) and the sum of all observations."""
        self._family(HistogramMetricFamily, name, about, {}).add_metric([self._run], buckets, total)

    def info(self, name: str, about: str, values: dict[str, str]) -> None:
        """Texts, as labels of NAME_info."""
        self._family(InfoMetricFamily, name, about, {}).add_metric([self._run], values)

    def _family(
        self, make: Callable[..., Family], name: str, about: str, labels: dict[str, object]
    ) -> Family:
        if name not in self.families:
            self.families[name] = make(f"laminar_{name}", f"{about}.", labels=["run", *labels])
        found: Family = self.families[name]
        return found


def _run(x: Exposition, view: View) -> None:
    x.info("run", "The run", {"pipeline": view.pipeline, "version": __version__})
    for state in _RUN_STATES:
        x.gauge("run_state", state == view.state, state=state)
    x.gauge("start_time_seconds", view.started or None)
    x.gauge("last_sign_time_seconds", view.last_sign or None)
    x.gauge("steps_wanted", view.wanted_steps)


def _steps(x: Exposition, view: View) -> None:
    if not view.steps:
        return
    newest, recent = view.steps[-1], list(view.steps)[-RECENT:]
    x.gauge("steps", newest["step"])
    if (seconds := _sum(recent, "seconds")) > 0:
        x.gauge("tokens_per_second", _sum(recent, "prompt_tokens", "response_tokens") / seconds)
        x.gauge("trainer_wait_fraction", _sum(recent, "wait_seconds") / seconds)
    numbers, rewards = step_figures(newest)
    for name, value in numbers.items():
        x.step(re.sub(r"\W", "_", _RENAMED.get(name, name)), name, value)
    for name, value in rewards.items():
        x.gauge("step_reward_function_mean", value, function=name)


def _sum(steps: list[dict], *fields: str) -> float:
    return sum(step.get(field) or 0.0 for step in steps for field in fields)


def _records(x: Exposition, view: View, totals: RunTotals) -> None:
    for name, row in COUNTERS.items():
        x.counter(name, row.about, totals.counters[name])
    for name, row in HISTOGRAMS.items():
        x.histogram(name, row.about, totals.histograms[name].cumulative(), totals.histograms[name].sum)
    published = view.newest.get("publish", {})
    for name in ("bytes_over_full", "changed_fraction"):
        x.gauge(f"publish_{name}", published.get(name))
    for (file, name), evaluation in totals.evaluations.items():
        for field in ("accuracy", "step"):
            x.gauge(f"evaluation_{field}", evaluation.get(field), file=file, name=name)


def _queues(x: Exposition, status: Status) -> None:
    queues = status.queues
    x.gauge("groups_generating", queues.generating)
    x.gauge("groups_ready", queues.ready)
    x.gauge("trajectories_unscored", queues.unscored)
    x.gauge("evaluations_waiting", queues.evaluations)
    x.gauge("replicas_waiting", queues.replicas_waiting)
    x.gauge("trainer_waits", bool(queues.trainer_waits))
    x.gauge("newest_weight_id", status.newest_weight_id)
    present = Counter(rank.role for rank in status.ranks)
    for role in ("trainer", "relay", "rollout"):
        x.gauge("ranks", present[role], role=role)


def _replicas(x: Exposition, status: Status, totals: RunTotals) -> None:
    ranks = sorted((rank for rank in status.ranks if rank.role == "rollout"), key=lambda rank: rank.index)
    known = [(rank, rank.load, _state(status, rank, rank.load)) for rank in ranks if rank.load]
    in_state = Counter(state for _, _, state in known)
    for state in _STATES:
        x.gauge("replicas", in_state[state], state=state)
    for field in LOADS:
        x.gauge(f"rollout_{field}", sum(getattr(load, field) for _, load, _ in known))
    if known:
        idle = sum(state == "open" and not load.running + load.queued for _, load, state in known)
        x.gauge("rollout_idle_fraction", idle / len(known))
    for rank, load, state in known[:REPLICAS_SHOWN]:
        x.gauge("replica_state", 1, replica=rank.index, state=state)
        x.gauge("replica_weight_step", rank.weight_step, replica=rank.index)
        for field in LOADS:
            x.gauge(f"replica_{field}", getattr(load, field), replica=rank.index)
        if mismatch := totals.mismatches.get(f"rollout{rank.index}"):  # one that has left would stay for good
            x.gauge("logprob_mismatch_mean", mismatch.get("mean"), replica=rank.index)
            x.gauge("logprob_mismatch_max", mismatch.get("max"), replica=rank.index)
    if totals.mismatches:
        x.gauge("logprob_mismatch_limit", [*totals.mismatches.values()][-1].get("limit"))


def _state(status: Status, rank: RankStatus, load: ReplicaLoad) -> str:
    return "silent" if status.time - rank.heard > SILENT_SECONDS else load.phase
