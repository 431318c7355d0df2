"""Whether a mini-batch may change the weights: the divergence guard. Pure; every trainer rank asks with the
same figures (trainer/step/guard.py).

    trajectory   its mismatch or largest importance ratio is above a limit            left out of the update
    update       too many of its trajectories are left out, or a figure of the whole
                 mini-batch is outside its band                                       skipped
    run          `stop_after` of the last 2 x `stop_after` updates were skipped       ends, with a checkpoint

A band is the median of a figure over the last `window` updates that were made, and `spread` times its spread:
1.4826 x the median distance from the median, as large as the standard deviation of normal figures, and never
less than a floor, so that a run whose figures hardly change is not held to nothing.

Invariants: equal figures give equal verdicts, also when `state` has been through a checkpoint. A figure that
is not finite is outside every band. A skipped update moves no band. Without BEGIN updates that were made
there is no band, so nothing but the limits of trajectories can skip an update.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

BEGIN = 5  # updates before there is a band
TOLERATED_MISMATCH = 0.3  # nats, in any run: a ratio of 1.35, which some updates give an answer of one token
_NAMED = 3  # trajectories that a text names
_NORMAL = 1.4826  # standard deviations in a median distance from the median, of normal figures
_TINY = 1e-12


class Guarded(NamedTuple):
    """A trajectory of a mini-batch: its mean |log-prob by the trainer - by the engine| in nats, and its
    largest log importance ratio. Either may be infinite; what is NaN is to be given as infinite."""

    trajectory_id: int
    mismatch: float
    log_ratio: float


class GuardLimits(NamedTuple):
    """Of one trajectory, in nats; beyond either it is left out."""

    mismatch: float
    log_ratio: float

    def hold(self, trajectory: Guarded) -> bool:
        """Whether it is trained."""
        return trajectory.mismatch <= self.mismatch and trajectory.log_ratio <= self.log_ratio


@dataclass(frozen=True)
class GuardVerdict:
    """`left_out`: trajectory id -> why; `skip`: why the update is not made; `stop`: why the run ends."""

    left_out: dict[int, str]
    skip: str = ""
    stop: str = ""


class _Figure(NamedTuple):
    """How a figure of a mini-batch is held to its band: by its logarithm to base 10 or as it is; which sides
    count; the least spread, a share of the median where it is no logarithm; never alarming up to `tolerated`.
    """

    words: str
    logarithmic: bool
    low: bool
    high: bool
    floor: float
    tolerated: float = -math.inf


# The floors times 10, the default of guard.spread, are factors of 10 (mismatch), 2 and 30, and half of the
# reward: ordinary runs halve their entropy within a window, and their mismatch follows staleness.
_FIGURES = {
    "mismatch": _Figure("median log-prob mismatch", True, False, True, 0.1, 0.02),
    "ratio": _Figure("mean importance ratio", True, True, True, 0.03),
    "entropy": _Figure("entropy", True, True, True, 0.15),
    "kl": _Figure("KL divergence from the reference", True, False, True, 0.1, 1.0),
    "reward": _Figure("mean reward", False, True, False, 0.05),
}


class Divergence:
    """The guard's memory. `judge` is called once for each mini-batch, in the order of the updates."""

    def __init__(
        self,
        mismatch_max: float,
        ratio_max: float,
        spread: float,
        window: int,
        skip_share: float,
        stop_after: int,
    ) -> None:
        self._mismatch_max = mismatch_max
        self._log_ratio_max = math.log(ratio_max)
        self._spread = spread
        self._window = window
        self._skip_share = skip_share
        self._stop_after = stop_after
        self._history: dict[str, list[float]] = {}
        self._skipped: list[bool] = []
        self._stop = ""

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it. After a stop it is empty: whoever goes on has seen why, and what
        the run does from then on is usual."""
        if self._stop:
            return {"history": {}, "skipped": []}
        return {"history": {name: list(of) for name, of in self._history.items()}, "skipped": self._skipped}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """After a load, with this launch's window."""
        self._history = {name: list(of)[-self._window :] for name, of in state["history"].items()}
        self._skipped = list(state["skipped"])
        self._stop = ""

    @property
    def limits(self) -> GuardLimits:
        """Of the trajectories of the next mini-batch: as usual as TOLERATED_MISMATCH or the run's own band
        has it, and never beyond the configured ones."""
        usual = TOLERATED_MISMATCH
        if len(medians := self._history.get("mismatch", [])) >= BEGIN:
            widths = self._history["mismatch_spread"]
            usual = max(usual, statistics.median(medians) + self._spread * statistics.median(widths))
        return GuardLimits(min(usual, self._mismatch_max), self._log_ratio_max)

    def judge(
        self, step: int, trajectories: Sequence[Guarded], figures: Mapping[str, float], reward_error: float
    ) -> GuardVerdict:
        """Of the mini-batch of an update of `step`; `figures` by the names of _FIGURES but mismatch, over the
        trajectories that are not left out; `reward_error`: the standard error of its mean reward."""
        if self._stop:
            return GuardVerdict({}, self._stop, self._stop)
        limits = self.limits
        out = {t.trajectory_id: _why(t, limits) for t in trajectories if not limits.hold(t)}
        known = [t.mismatch for t in trajectories if t.trajectory_id not in out]
        if len(out) > self._skip_share * len(trajectories) or not known:
            return self._after(step, out, _of_many(trajectories, out, limits))
        median = statistics.median(known)
        mine = {**figures, "mismatch": median}
        if wrong := self._outside(mine, reward_error):
            text = f"{wrong}, in a mini-batch of {len(trajectories)} trajectories from {_ids(trajectories)}"
            return self._after(step, out, text)
        mine["mismatch_spread"] = _NORMAL * statistics.median(abs(value - median) for value in known)
        for name, value in mine.items():
            self._history[name] = [*self._history.get(name, []), value][-self._window :]
        return self._after(step, out, "")

    def _after(self, step: int, out: dict[int, str], skip: str) -> GuardVerdict:
        self._skipped = [*self._skipped, bool(skip)][-2 * self._stop_after :]
        if skip and sum(self._skipped) >= self._stop_after:
            several = f"{sum(self._skipped)} of the last {len(self._skipped)} updates were skipped"
            self._stop = f"{several}, the last at step {step + 1}: {skip}"
        return GuardVerdict(out, skip, self._stop)

    def _outside(self, figures: Mapping[str, float], reward_error: float) -> str:
        """Which figure is outside its band, in words; "" if none is."""
        for name, value in figures.items():
            figure, history = _FIGURES[name], self._history.get(name, [])
            if not math.isfinite(value):
                return f"the {figure.words} is {value:g}"
            if len(history) < BEGIN or value <= figure.tolerated:
                continue
            low, high = self._band(figure, history, reward_error if name == "reward" else 0.0)
            if value < low or value > high:
                band = " to ".join(f"{bound:.3g}" for bound in (low, high) if math.isfinite(bound))
                return f"the {figure.words} is {value:.3g}, outside its usual band ({band})"
        return ""

    def _band(self, figure: _Figure, history: Sequence[float], error: float) -> tuple[float, float]:
        scaled = [math.log10(max(value, _TINY)) if figure.logarithmic else value for value in history]
        centre = statistics.median(scaled)
        floor = figure.floor if figure.logarithmic else max(figure.floor * abs(centre), error)
        usual = max(_NORMAL * statistics.median(abs(value - centre) for value in scaled), floor)
        ends = centre - self._spread * usual, centre + self._spread * usual
        low, high = (10.0 ** min(end, 300.0) for end in ends) if figure.logarithmic else ends
        return low if figure.low else -math.inf, high if figure.high else math.inf


def _ids(trajectories: Sequence[Guarded]) -> str:
    """Their smallest and largest id."""
    ids = [t.trajectory_id for t in trajectories]
    return f"{min(ids)} to {max(ids)}"


def _why(t: Guarded, limits: GuardLimits) -> str:
    if t.mismatch > limits.mismatch:
        return f"log-prob mismatch {t.mismatch:.3g} above {limits.mismatch:.3g} nats"
    return f"importance ratio e^{t.log_ratio:.3g} above e^{limits.log_ratio:.3g}"


def _of_many(trajectories: Sequence[Guarded], out: Mapping[int, str], limits: GuardLimits) -> str:
    """Too many are left out: by which figure, and the worst of them."""
    left = [t for t in trajectories if t.trajectory_id in out]
    by_mismatch = [(t.mismatch, t.trajectory_id) for t in left if t.mismatch > limits.mismatch]
    by_ratio = [(t.log_ratio, t.trajectory_id) for t in left]
    what = f"log-prob mismatch above {limits.mismatch:.3g} nats" if by_mismatch else "log ratio too large"
    worst = sorted(by_mismatch or by_ratio, key=lambda pair: (-pair[0], pair[1]))[:_NAMED]
    named = ", ".join(f"trajectory {i} ({value:.3g})" for value, i in worst)
    return f"{len(left)} of {len(trajectories)} trajectories are left out: {what}, the worst {named}"
