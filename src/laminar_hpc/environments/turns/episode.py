"""One trajectory of several turns as a pure state machine: what its next step is, and what is known of it at
the end. Owns no task, no process and no clock.

    turn ends -> calls, within the limits -> results -> next turn
              -> a final answer, or a limit  -> it ends, with a finish reason

A trajectory that is cut by a limit is graded on what is there; its finish reason says which limit it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar_hpc.config.schema import EnvironmentConfig

_PREFIX = "environment."
BUSY_SHARE = f"{_PREFIX}busy_share"
TRIES = 3  # of one trajectory at one replica, whose environment fails


def begins_again(tries: int, young: bool) -> bool:
    """Whether a trajectory whose environment has failed so many times at its replica begins again there; else
    whichever replica is next has it. `young`: of its local batch most is still under way."""
    return tries < TRIES and young


def patient(tries: int) -> bool:
    """Whether each call has all of environment.timeout_seconds in this try, the first one 1, at whichever
    replica: what is merely slow fails no trajectory for good."""
    return tries >= TRIES


@dataclass
class Episode:
    """`began`: when its first token was asked for, in seconds since the Unix epoch."""

    limits: EnvironmentConfig
    began: float
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    wait_seconds: float = 0.0
    seen_tokens: int = 0  # of the prompts of all turns, those that the engine has had before
    cached_tokens: int = 0  # of those, taken from the prefix cache
    opened: float = 0.0  # when its environment was reset for it, and for how long that has worked
    worked_seconds: float = 0.0
    names: dict[str, int] = field(default_factory=dict)  # of tools, how often each was called
    refusals: list[str] = field(default_factory=list)  # why requests of its agent were refused

    def waited(self, seconds: float) -> None:
        """For a reset, or for a place among the engine's requests."""
        self.wait_seconds += seconds

    def reset(self, opened: float, seconds: float) -> None:
        """The environment is kept for the trajectory from then on."""
        self.opened = opened
        self.worked_seconds = seconds
        self.waited(seconds)

    def turn(self, seen_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A turn has ended: the seconds that it took, and how much of its prompt the engine had before."""
        self.generate_seconds += seconds
        if seen_tokens:
            self.seen_tokens += seen_tokens
            self.cached_tokens += min(cached_tokens, seen_tokens)
        self.turns += 1

    def limit(self, wanted: Sequence[str], now: float) -> str:
        """Which limit keeps the turn's calls from being made and answered; "" is none."""
        if self.turns >= self.limits.max_turns:
            return "turns"
        if self.calls + len(wanted) > self.limits.max_tool_calls:
            return "calls"
        return "time" if self.seconds_left(now) <= 0 else ""

    def seconds_left(self, now: float) -> float:
        return self.limits.max_seconds - (now - self.began)

    def called(self, wanted: Sequence[str], failed: int, seconds: float) -> None:
        """Its turn's calls have been answered, in so many seconds; `failed`: with an error or unreadable."""
        self.calls += len(wanted)
        self.failed_calls += failed
        self.tool_seconds += seconds
        self.worked_seconds += seconds
        for name in wanted:
            self.names[name] = self.names.get(name, 0) + 1

    def figures(self, now: float) -> dict[str, float]:
        """For the trajectory's record at its grading; the cached share only where there was a later turn."""
        found = {
            "turns": self.turns,
            "tool_calls": self.calls,
            "failed_calls": self.failed_calls,
            "generate_seconds": self.generate_seconds,
            "tool_seconds": self.tool_seconds,
            "wait_seconds": self.wait_seconds,
        }
        if self.limits.by_url:
            found["refused_requests"] = len(self.refusals)
        if self.seen_tokens:
            found["cached_share"] = self.cached_tokens / self.seen_tokens
        if self.opened and now > self.opened:
            found["busy_share"] = min(1.0, self.worked_seconds / (now - self.opened))
        return {f"{_PREFIX}{name}": float(value) for name, value in found.items()}
