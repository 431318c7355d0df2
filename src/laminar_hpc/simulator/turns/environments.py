"""The environments of all replicas: what a trajectory does when its turn has ended, by the rules of the run's
own state machine (environments/turns/episode.py), and when a call is given up (policies/deadlines.py). Has no
clock; events.py asks it.

    turn ends -> its calls, within the limits -> their results are prefilled -> next turn
              -> the last turn, or a limit    -> it ends
    a call fails with its environment         -> from the prompt, here or elsewhere
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.episode import Episode, begins_again, patient
from laminar_hpc.policies.deadlines import Deadline
from laminar_hpc.simulator.turns.course import Course, Took

_RESET, _CALL = "reset", "call"


class _Pending(NamedTuple):
    """What an environment does, since when, and whether it will be given up."""

    what: str
    since: float
    hangs: bool


@dataclass
class Play:
    """One trajectory with its environment. `again`: its course in another try. `asked`: when its turn was;
    `placed`: when it had a place among the replica's requests, None while it waits for one. `tries`: at its
    present replica, `failures` at all. `tokens`: of the response so far, `drawn` of them by the model."""

    course: Course
    again: Callable[[int], Course]
    episode: Episode
    asked: float = 0.0
    placed: float | None = None
    tries: int = 1
    failures: int = 0
    tokens: int = 0
    drawn: int = 0
    pending: _Pending | None = None

    def anew(self) -> list[int]:
        """Goes back to the prompt. Gives the tokens of each turn."""
        self.tokens = self.drawn = 0
        return list(self.course.drawn)

    def ask(self, now: float, place_free: bool) -> None:
        """Asks the engine for the next turn."""
        self.asked = now
        self.placed = now if place_free else None


@dataclass
class Spent:
    """Sums over the trajectories that have ended, of what their episodes have counted."""

    trajectories: float = 0.0
    turns: float = 0.0
    tool_calls: float = 0.0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    wait_seconds: float = 0.0
    retries: float = 0.0

    def add(self, play: Play) -> None:
        episode = play.episode
        self.trajectories += 1
        self.turns += episode.turns
        self.tool_calls += episode.calls
        self.generate_seconds += episode.generate_seconds
        self.tool_seconds += episode.tool_seconds
        self.wait_seconds += episode.wait_seconds
        self.retries += play.failures

    def means(self, before: "Spent") -> dict[str, float]:
        """Per trajectory that has ended since `before`."""
        since = {key: value - getattr(before, key) for key, value in vars(self).items()}
        count = max(1.0, since.pop("trajectories"))
        return {f"{key}_mean": value / count for key, value in since.items()}


@dataclass
class Environments:
    """`bound`: each trajectory has one of its own, which hangs or fails for good; else functions, whose
    failure the model is told. `scale`: the simulation's seconds in one of theirs. `longest`: tokens of a
    response."""

    limits: EnvironmentConfig
    bound: bool
    scale: float
    longest: int
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        limit = self.limits.timeout_seconds
        self._deadlines: dict[tuple[int, str], Deadline] = defaultdict(lambda: Deadline(limit))

    def play(self, course: Course, again: Callable[[int], Course]) -> Play:
        """A new trajectory, which no replica has yet."""
        return Play(course, again, Episode(self.limits, 0.0))

    def reset(self, play: Play, replica: int, now: float) -> Took:
        """Begins an episode at this replica. Gives what the reset takes, in the simulation's seconds."""
        play.episode = Episode(self.limits, now / self.scale)
        return self._takes(play, replica, _RESET, now, play.course.reset)

    def turned(self, play: Play, replica: int, turn: int, drawn: int, now: float) -> Took | None:
        """Turn `turn`, from 1, has ended with so many tokens: what its calls take; None for the last."""
        play.tokens += drawn
        play.drawn += drawn
        placed = play.asked if play.placed is None else play.placed
        play.episode.waited((placed - play.asked) / self.scale)
        play.episode.turn(0, 0, (now - placed) / self.scale)
        if turn > len(play.course.given):
            return None
        if play.episode.limit([_CALL] * play.course.calls[turn - 1], now / self.scale):
            return None
        return self._takes(play, replica, _CALL, now, play.course.took[turn - 1])

    def returned(self, play: Play, replica: int, turn: int, now: float) -> None:
        """Counts the calls of a turn, or at turn 0 the reset, which have ended or were given up."""
        pending = play.pending
        assert pending is not None
        seconds = (now - pending.since) / self.scale
        deadline = self._deadlines[replica, pending.what]
        if self.bound and pending.hangs:
            deadline.given_up(seconds)
        else:
            deadline.took(seconds)
        if pending.what == _RESET:
            play.episode.reset(pending.since / self.scale, seconds)
        else:
            play.episode.called([_CALL] * play.course.calls[turn - 1], 0, seconds)

    def given(self, play: Play, turn: int) -> int | None:
        """The tokens given behind turn `turn`, at 0 by the reset; None when there is no room for them."""
        tokens = play.course.given[turn - 1] if turn else play.course.opening
        if turn and tokens >= self.room(play):
            return None
        play.tokens += tokens
        return tokens

    def room(self, play: Play) -> int:
        """Response tokens that the trajectory may still get."""
        return max(1, self.longest - play.tokens)

    def failed(self, play: Play, young: bool) -> bool:
        """The environment failed. Whether the trajectory begins again here; the new try takes other times."""
        here = begins_again(play.tries, young)
        play.failures += 1
        play.tries = play.tries + 1 if here else 1
        play.course = play.again(play.failures + 1)
        return here

    def ended(self, play: Play) -> None:
        """Counts a trajectory that has its last token."""
        self.spent.add(play)

    def _takes(self, play: Play, replica: int, what: str, now: float, took: Took) -> Took:
        """Notes what the environment does. What takes longer than its deadline is given up then."""
        limit = self._deadlines[replica, what].limit(not self.bound or patient(play.failures + 1))
        hangs = took.seconds > limit
        play.pending = _Pending(what, now, hangs)
        return Took(min(took.seconds, limit) * self.scale, self.bound and (took.failed or hangs))
