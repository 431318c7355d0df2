"""`laminar plan`: the best of all divisions of a cluster (divisions.py), by simulation, the most promising
first.

Two numbers order and end the search, and neither is taken for the other:

    estimate    closed forms of both sides with full batches, times what the nearest division that was
                simulated reached of its own. It says which is simulated next, and proves nothing.
    bound       what the trainer alone would do if it never waited. No simulation of the division exceeds it
                (`trainer_bound`), so one whose bound is below the best score need not be simulated.

The search ends when all are simulated or excluded by their bound, or when `budget_seconds` are over; without
that key also when, after some seconds, no estimate is above the best score. `Plan.rest` says what was left.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.divisions import (
    Candidate,
    candidates,
    describe,
    kv_cache_tokens,
    price,
    repack_of,
    trainer_gpu,
    trainer_settings,
)
from laminar_hpc.simulator.one_gpu import taking_turns
from laminar_hpc.simulator.plan_refusal import why_nothing_fits
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.setup import SimulationSetup, rollout_of, setup
from laminar_hpc.simulator.tables import MODELS
from laminar_hpc.simulator.trainer_cost import JobCosts
from laminar_hpc.simulator.trainer_fit import layout_of
from laminar_hpc.simulator.workload import Workload

_GROUPS = 50_000  # whose lengths are looked at in a second or so
_REACHED = 0.95  # of its estimate is what a simulation reaches at most, as a rule
_FAILED = 0.5  # the same of one that is too slow or leaves the trainer idle, for its neighbours
_CANDIDATES = 100_000  # whose estimates are computed in a few seconds
_SIMULATED = 400  # candidates, of a second or so each
_THOROUGH_SECONDS = 10.0  # of search through all divisions, before estimates end it
_SECONDS = 90.0  # of search where budget_seconds does not say


@dataclass(frozen=True)
class PlannedLengths:
    """Of the responses that a plan's run trains, in tokens. `mean`, `context`: of a trajectory, and before a
    generated token, with the prompt. `least`, `most`: between which the mean of those lies that are trained
    after the warm-up, prompts included, whichever they are. `longest`: of each group, in ascending order."""

    mean: float
    context: float
    least: float
    most: float
    longest: list[int]

    def longest_of(self, groups: int) -> float:
        """The longest response among so many groups, in the middle of the cases."""
        return self.longest[int(len(self.longest) * 0.5 ** (1.0 / groups))]


@dataclass(eq=False)
class RatedCandidate:
    """`score`: tokens/s, or tokens per $ with objective=cost. `bound`: what it can be at most; `estimate`:
    what it may be. `figures`: None before it is simulated."""

    candidate: Candidate
    bound: float
    estimate: float = 0.0
    score: float = -math.inf
    price: float = 0.0
    figures: dict | None = None
    why_not: str = ""

    @property
    def reached(self) -> float:
        """Score of one that was simulated over its estimate."""
        return _FAILED if self.score == -math.inf else self.score / self.estimate


@dataclass
class Plan:
    """`excluded`: not simulated, as their bounds are below the best score. `cut_off`: why the others were not
    simulated."""

    best: RatedCandidate
    runner_up: RatedCandidate | None
    simulated: int
    candidates: int
    excluded: int = 0
    cut_off: str = ""

    @property
    def ended(self) -> bool:
        """No other division is better: each was simulated or is excluded by its bound."""
        return self.simulated + self.excluded == self.candidates

    @property
    def rest(self) -> str:
        """What was simulated, and what is known of the others."""
        text = f"{self.simulated} of {self.candidates} divisions simulated"
        parts = [f"the trainer alone of {self.excluded} others is slower than this"] if self.excluded else []
        if left := self.candidates - self.simulated - self.excluded:
            parts.append(f"{left} left out: {self.cut_off}")
        return "; ".join([text, *parts])


def planned_lengths(config: PlanConfig) -> PlannedLengths:
    """Of the groups that a run trains: after the warm-up these are `steps - warmup_steps` batches of all that
    are granted until then, which the staleness bound makes at most `steps + max_staleness` batches. The mean
    of the shortest groups, so many of them, is the least that theirs can have. Of more groups than can be
    looked at nothing is known but the limits of a response."""
    w, groups = config.workload, config.workload.prompts_per_step
    granted = (config.steps + config.max_staleness) * groups
    step = max(1, -(-granted // _GROUPS))
    work = Workload(w, config.seed, config.steps * groups)
    found = [work.lengths(index) for index in range(0, granted, step)]
    kept = found[config.warmup_steps * groups // step : config.steps * groups // step]
    shown = [n for of in kept for n in of]
    least, most = 1.0, float(w.max_response_tokens)
    if step == 1:
        means = sorted(sum(of) / len(of) for of in found)
        trained = (config.steps - config.warmup_steps) * groups
        least, most = (sum(part) / trained for part in (means[:trained], means[-trained:]))
    return PlannedLengths(
        sum(shown) / len(shown),
        w.prompt_tokens + sum(n * n for n in shown) / (2 * sum(shown)),
        w.prompt_tokens + least,
        w.prompt_tokens + most + (w.turns - 1) * w.turn_tokens,
        sorted(max(of) for of in kept),
    )


def trainer_bound(job: JobCosts, config: PlanConfig, lengths: PlannedLengths) -> float:
    """Tokens/s that no simulated run exceeds: those of a trainer that never waits, has no pipeline bubble and
    ranks with equal work.

    A batch of B trajectories with n tokens each takes at least sum(a n + b n^2 + h) + c seconds, with costs
    for a token, a squared token, a trajectory and a step. With their mean x, sum(n^2) >= B x^2 (Cauchy), so
    that the rate is at most 1 / (a + b x + (h + c / B) / x), and x is between `least` and `most`. Several
    batches have the same bound with x as the mean of all.
    """
    w = config.workload
    token, attention = job.train_token + job.logprob_token, job.train_attention + job.logprob_attention
    step = w.updates_per_step * job.update + job.publish_stall
    fixed = job.overlapped_handling + step / (w.prompts_per_step * w.samples_per_prompt)
    x = math.sqrt(fixed / attention) if attention else lengths.most  # where the seconds per token are least
    x = min(lengths.most, max(lengths.least, x))
    return 1.0 / (token + attention * x + fixed / x)


def rates(config: PlanConfig, candidate: Candidate, lengths: PlannedLengths) -> tuple[float, float]:
    """Tokens/s, prompts included: the bound, and the estimate, which decodes with full batches all the
    time."""
    made, w = setup_of(config, candidate), config.workload
    bound = trainer_bound(made.job, config, lengths)
    groups = -(-w.prompts_per_step // candidate.replicas)
    granted, longest, generate = groups * w.samples_per_prompt, lengths.longest_of(groups), 0.0
    for kind in made.engines:  # a local batch takes as long as its longest response, or as all in turn
        batch = min(config.max_concurrent, granted, kind.capacity / lengths.context)
        together = kind.costs.step(batch, batch * lengths.context) / batch
        seconds = max(granted * lengths.mean * together, longest * kind.costs.step(1, lengths.context))
        generate += kind.count * granted * lengths.mean / seconds
    return bound, min(bound, generate * (lengths.mean + w.prompt_tokens) / lengths.mean)


def setup_of(config: PlanConfig, candidate: Candidate) -> SimulationSetup:
    """The run that is simulated of it."""
    rollouts = [rollout_of(config.pools[pool], gpus, tp) for pool, gpus, tp in candidate.rollouts]
    pool, gpu = (
        config.pools[candidate.trainer_pool],
        trainer_gpu(config, candidate.trainer_pool, candidate.trainer_gpus),
    )
    hours, machines = pool.mtbf_hours, max(1, candidate.trainer_gpus // gpu.machine)
    rules = dataclasses.replace(
        PIPELINES["laminar"], max_staleness=config.max_staleness, repack=repack_of(config, candidate)
    )
    run = setup(
        rules,
        MODELS[config.model],
        gpu,
        candidate.trainer_gpus,
        rollouts,
        config.workload,
        DEFAULT,
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        seed=config.seed,
        max_concurrent=config.max_concurrent,
        trainer_mtbf=hours and hours * 3600 / machines,
        layout=layout_of(trainer_settings(config, candidate), config.lora),
        equal_batches=True,
    )
    capacity = kv_cache_tokens(config, candidate)
    kinds = tuple(dataclasses.replace(kind, capacity=capacity) for kind in run.engines)
    return dataclasses.replace(run, engines=kinds)


def planned_setup(config: PlanConfig, candidate: Candidate) -> SimulationSetup:
    """The run whose figures are the plan's: on one GPU with both at their shares of it."""
    run = setup_of(config, candidate)
    return taking_turns(run) if candidate.shared else run


def evaluate(config: PlanConfig, candidate: Candidate) -> dict:
    return simulate(planned_setup(config, candidate)).figures


def judge(config: PlanConfig, planned: RatedCandidate) -> None:
    """Score of a simulated candidate; -inf when it leaves the trainer idle beyond what `trainer_busy` allows
    or is slower than `least_throughput` (objective=cost only)."""
    assert planned.figures is not None
    rate = planned.figures["tokens_per_second"]
    planned.score = rate if config.objective == "throughput" else rate * 3600 / planned.price
    busy = 1.0 - planned.figures["trainer_wait_share"]
    if config.objective == "cost" and busy < config.trainer_busy:
        planned.why_not = f"the trainer is busy for {busy:.0%} of the time only"
    if config.objective == "cost" and rate < config.least_throughput:
        planned.why_not = f"fewer than {config.least_throughput:,.0f} tokens/s"
    if planned.why_not:
        planned.score = -math.inf


def options_of(config: PlanConfig) -> list[RatedCandidate]:
    """All divisions with bound and estimate. Raises LaminarError when nothing fits."""
    lengths, options = planned_lengths(config), list[RatedCandidate]()
    for candidate in islice(candidates(config), _CANDIDATES + 1):
        cost = price(config, candidate)
        per = 1.0 if config.objective == "throughput" else 3600 / cost
        bound, estimate = rates(config, candidate, lengths)
        options.append(RatedCandidate(candidate, bound * per, estimate * per, price=cost))
    if not options:
        raise LaminarError(why_nothing_fits(config))
    if len(options) > _CANDIDATES:
        raise LaminarError(
            f"plan: more than {_CANDIDATES:,} ways to divide these pools; ask with fewer or smaller ones"
        )
    return options


@dataclass
class Search:
    """A search as it stands: what is left to try, what was tried, and the best of that."""

    config: PlanConfig
    left: list[RatedCandidate]
    tried: list[RatedCandidate] = field(default_factory=list)
    best: RatedCandidate | None = None
    excluded: int = 0
    cut_off: str = ""
    begun: float = field(default_factory=time.process_time)

    def run(self, say: Callable[[str], None]) -> None:
        """Until nothing is left that is worth it, the budget is over, or Ctrl-C."""
        config, of = self.config, len(self.left)
        budget = config.budget_seconds or _SECONDS
        try:
            while self.left and not self.cut_off:
                planned = max(self.left, key=self.promise)
                if self.worth(planned):
                    self.left.remove(planned)
                    planned.figures = evaluate(config, planned.candidate)
                    judge(config, planned)
                    self.take(planned)
                    say(
                        f"{len(self.tried)}/{of} {describe(config, planned.candidate)}: {self._said(planned)}"
                    )
                if self.left and self.seconds > budget:
                    self.cut_off = f"the {budget:g} s of budget_seconds are over, and one may be better"
                elif self.left and len(self.tried) >= _SIMULATED:
                    self.cut_off = f"{_SIMULATED} are simulated at most, and one may be better"
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.cut_off = "Ctrl-C, and one may be better"

    @property
    def seconds(self) -> float:
        """Of a core, so that a busy machine finds the same plan."""
        return time.process_time() - self.begun

    def promise(self, planned: RatedCandidate) -> float:
        """Its estimate, times what the nearest of its kind that was simulated reached of its own."""
        near = [other for other in self.tried if _kind(other) == _kind(planned)]
        if not near:
            return planned.estimate
        return planned.estimate * min(near, key=lambda other: _distance(other, planned)).reached

    def worth(self, planned: RatedCandidate) -> bool:
        """Whether the most promising one is to be simulated; with false it is excluded by its bound, or the
        search has ended."""
        score = self.best.score if self.best else -math.inf
        before = len(self.left)
        self.left = [other for other in self.left if other.bound > score]
        self.excluded += before - len(self.left)
        if planned not in self.left:
            return False
        by_estimate = self.config.budget_seconds is None and self.seconds > _THOROUGH_SECONDS
        if by_estimate and _REACHED * max(other.estimate for other in self.left) < score:
            self.cut_off = "estimates, which may be wrong, say they are slower; budget_seconds=N tries them"
        return not self.cut_off

    def take(self, planned: RatedCandidate) -> None:
        self.tried.append(planned)
        if planned.score > (self.best.score if self.best else -math.inf):
            self.best = planned

    def _said(self, planned: RatedCandidate) -> str:
        assert planned.figures is not None
        rate = f"{planned.figures['tokens_per_second']:,.0f} tokens/s"
        return f"{rate}, the best so far" if planned is self.best else f"{rate} {planned.why_not}".rstrip()


def _kind(planned: RatedCandidate) -> tuple[int, int, tuple[int, ...]]:
    candidate = planned.candidate
    return candidate.trainer_pool, candidate.tensor_parallel, tuple(pool for pool, *_ in candidate.rollouts)


def _distance(a: RatedCandidate, b: RatedCandidate) -> float:
    """How differently two of a kind use their GPUs."""
    sizes = zip(_sizes(a.candidate), _sizes(b.candidate), strict=True)
    return sum(abs(math.log(x / y)) for x, y in sizes)


def _sizes(candidate: Candidate) -> list[int]:
    return [candidate.trainer_gpus, *(gpus for _, gpus, _ in candidate.rollouts)]


def search(config: PlanConfig, say: Callable[[str], None] = lambda line: None) -> Plan:
    """Raises LaminarError when nothing fits or nothing keeps the trainer busy."""
    options = options_of(config)
    found = Search(config, list(options))
    found.run(say)
    best, tried = found.best, found.tried
    if best is None:
        least = f" and reaches {config.least_throughput:,.0f} tokens/s" if config.least_throughput else ""
        cut = f" ({found.cut_off})" if found.left else ""
        raise LaminarError(
            f"plan: no part of the pools keeps the trainer busy for {config.trainer_busy:.0%}{least}{cut}; "
            f"lower trainer_busy{' or least_throughput' if least else ''} or add rollout GPUs"
        )
    others = sorted((planned for planned in tried if planned is not best), key=lambda planned: -planned.score)
    return Plan(best, others[0] if others else None, len(tried), len(options), found.excluded, found.cut_off)
