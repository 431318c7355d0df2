"""How many replicas a run should have, between two bounds. Pure.

All rates are the run's own, in trained tokens per second, over a window of trainer steps: what the trainer
would take if it never waited, D = T / (S - W), and what a replica gives while it is busy, R = T / (N - I), of
T tokens in S seconds, of which the trainer waited W, and N replica-seconds, of which I without work. With
n replicas the run makes

    X(n) = (D^-p + (n R(n))^-p)^(-1/p)

where p says how well the two overlap. It follows from the window itself, where X = T / S: p is the root of
(1 - W/S)^p + (1 - I/N)^p = 1. If the two take turns (pipeline=sync) p is 1, and if one of them is never idle
X is the smaller of both rates; p is taken as SHARPEST at most, as nothing overlaps perfectly. Where the
window did better than that, what it made stands: the least for more replicas, and the most for fewer. R(n)
falls where more replicas get smaller local batches, by the engines' own decode curve.

With X(most) the best there is, the run grows when it makes less than POOR of it, to the fewest replicas that
make GOOD of it, and shrinks to the fewest that make ALL_BUT of it. As POOR < GOOD < ALL_BUT a change is
followed by no other while the rates stay the same. A wish has to last for WINDOWS, as a step that waits for
one long response is followed by some that do not; or for one, to grow from less than URGENT. Where rates
swing, a wish to turn the number round has to last twice as long after each change of direction.

    >>> slow = ScalingWindow(steps=5, tokens=1000, seconds=10, waited=5, replicas=2, idle=0.0)
    >>> [round(rates(slow).throughput(n)) for n in (2, 4, 8)]
    [100, 183, 200]
    >>> Scaling(fewest=1, most=8).decide(slow, Costs(left=1000, start=30, drain=5)).target
    5
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

POOR, GOOD, ALL_BUT = 0.90, 0.93, 0.96
SHARPEST = 8.0
URGENT = 0.75
WINDOWS = 2
PATIENCE_MAX = 64  # windows
_HALVINGS = 60


@dataclass(frozen=True)
class ScalingWindow:
    """What was seen over some whole trainer steps. `waited`: seconds of `seconds` that the trainer had no
    batch; `replicas`: the mean number; `idle`: the share of their time that they had no work.

    `curve`: (requests, seconds per decode step), ascending; `requests`: that a busy replica has, on average,
    at least 1, or 0 = not known; it decodes `at_once` of them at most. With `divides` local batches are parts
    of a step's prompts, so that more replicas have fewer each."""

    steps: int
    tokens: float
    seconds: float
    waited: float
    replicas: float
    idle: float
    requests: float = 0.0
    curve: Sequence[tuple[int, float]] = ()
    at_once: float = math.inf
    divides: bool = False

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class ScalingRates:
    """Tokens per second: `demand` of a trainer that never waits, `supply` of a busy replica."""

    demand: float
    supply: float
    overlap: float
    window: ScalingWindow

    def of_replica(self, n: float) -> float:
        """What each of `n` gives while it is busy."""
        w = self.window
        if not (w.divides and w.curve and w.requests):
            return self.supply
        then, now = (min(w.at_once, w.requests * w.replicas / of) for of in (n, w.replicas))
        return self.supply * _decoded(w.curve, then) / _decoded(w.curve, now)

    def throughput(self, n: float) -> float:
        """Of a run with `n` replicas; never less than with fewer."""
        least = min(self.demand, n * self.of_replica(n))
        most = max(self.demand, n * self.of_replica(n))
        found = least * (1.0 + (least / most) ** self.overlap) ** (-1.0 / self.overlap)
        if self.overlap < SHARPEST:  # the window's own throughput is on this curve
            return found
        seen, now = self.window.throughput, self.window.replicas
        return max(found, seen) if n >= now else min(found, seen)


@dataclass(frozen=True)
class Costs:
    """Seconds: `left` of the run at its present pace, `start` of a replica until it serves, `drain` of one
    that is let go."""

    left: float
    start: float
    drain: float


@dataclass(frozen=True)
class Decision:
    """`gain`: predicted throughput over that of the present number, less 1."""

    target: int
    gain: float
    rates: ScalingRates


def rates(w: ScalingWindow) -> ScalingRates:
    """What follows from a window, which has tokens."""
    works, busy = max(1e-3, 1.0 - w.waited / w.seconds), max(1e-3, 1.0 - w.idle)
    return ScalingRates(w.throughput / works, w.throughput / (w.replicas * busy), _overlap(works, busy), w)


def _overlap(works: float, busy: float) -> float:
    """The root p of works^p + busy^p = 1, from 1 to SHARPEST."""
    low, high = 1.0, SHARPEST
    if works + busy <= 1.0:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if works**middle + busy**middle > 1.0 else (low, middle)
    return high


def _decoded(curve: Sequence[tuple[int, float]], requests: float) -> float:
    """Tokens per second of a replica with so many requests: between two points of the curve its step is
    interpolated, outside them that of the nearest point."""
    (before, step), *rest = curve
    for at, seconds in rest:
        if before <= requests <= at:
            step += (seconds - step) * (requests - before) / (at - before)
            break
        if requests > at:
            before, step = at, seconds
    return requests / step


@dataclass
class Scaling:
    """Decides; one for the life of a run. The target is from `fewest` to `most`, whatever the rates are."""

    fewest: int
    most: int
    reversals: int = 0
    _wish: int = 0  # -1: fewer, 1: more
    _lasts: int = 0  # windows
    _last: int = field(default=0)  # direction of the newest decision

    def decide(self, window: ScalingWindow, costs: Costs) -> Decision | None:
        """After each window; None: stay. The caller acts on what is returned."""
        now = round(window.replicas)
        found = rates(window)
        target = self._wanted(found, now)
        pays = self._pays(found, now, target, costs)
        wish = (target > now) - (target < now) if pays else 0
        self._lasts = self._lasts + 1 if wish == self._wish else 1
        self._wish = wish
        urgent = found.throughput(now) < URGENT * found.throughput(self.most)
        if not wish or self._lasts < self._patience(wish, urgent):
            return None
        self.reversals += self._last == -wish
        self._last = wish
        self._wish = self._lasts = 0
        return Decision(target, found.throughput(target) / found.throughput(now) - 1.0, found)

    def _wanted(self, found: ScalingRates, now: int) -> int:
        best = found.throughput(self.most)
        if now < self.fewest or (now < self.most and found.throughput(now) < POOR * best):
            return max(now + 1, self._enough(found, GOOD * best))
        return min(now, self._enough(found, ALL_BUT * best))

    def _enough(self, found: ScalingRates, throughput: float) -> int:
        numbers = range(self.fewest, self.most)
        return next((n for n in numbers if found.throughput(n) >= throughput), self.most)

    def _pays(self, found: ScalingRates, now: int, target: int, costs: Costs) -> bool:
        """More: what is gained until the end is more than the start-up takes. Fewer: what is freed is more
        than letting go takes, and a start in case it was wrong."""
        if target > now:
            return costs.left * (1.0 - found.throughput(now) / found.throughput(target)) > costs.start
        return costs.left > costs.drain + costs.start

    def _patience(self, wish: int, urgent: bool) -> int:
        first = 1 if wish > 0 and urgent else WINDOWS
        turns = self.reversals if self._last == -wish else 0
        return min(PATIENCE_MAX, first << turns)
