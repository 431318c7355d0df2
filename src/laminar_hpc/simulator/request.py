"""What an engine is asked for, and the two engines' rules for admitting it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laminar_hpc.simulator.constants import Constants

ENGINES = ("sglang", "vllm")


@dataclass(frozen=True)
class EngineAdmission:
    """When an engine admits a request, and which one it preempts when the KV is full.

    SGLang: all running ones are expected to grow by `ratio` of `clip` tokens, the new one by all of `clip`.
    `ratio` starts at `start`, falls to `ratio_min` within `steps` decode steps, and is set by a preemption
    (constants.py). The request that has generated least goes to the end of the queue. vLLM
    (v1/core/sched/scheduler.py): what fits now is admitted, `clip` is 0; the one admitted last goes back to
    the head of the queue.

    `longest`: tokens of a response at most.
    """

    longest: int
    clip: float
    start: float = 0.0
    ratio_min: float = 0.0
    steps: float = 1.0
    retract_steps: float = 0.0
    newest_back: bool = False

    @staticmethod
    def of(longest: int, c: Constants, engine: str = "sglang") -> "EngineAdmission":
        if engine == "vllm":
            return EngineAdmission(longest, 0.0, newest_back=True)
        clip = min(c.admission_clip_tokens, longest)
        return EngineAdmission(
            longest,
            clip,
            c.new_token_ratio,
            c.new_token_ratio_min,
            c.new_token_ratio_steps,
            c.retract_steps,
        )


class SimulatedRequest:
    """A trajectory on its way. `context`: its tokens so far, `uncached`: those without KV; both are
    meaningful only while not running. `turns`: drawn tokens of each; `play`: what one of several turns has
    with its environment (turns/environments.py), None with one."""

    __slots__ = (
        "away",
        "context",
        "end",
        "granted",
        "group",
        "home",
        "moves",
        "offset",
        "play",
        "remaining",
        "started",
        "ticket",
        "trajectory_id",
        "turn",
        "turns",
        "uncached",
        "versions",
        "weight_step",
    )

    def __init__(
        self,
        trajectory_id: int,
        group: Any,
        turns: Sequence[int],
        prompt_tokens: float,
        weight_step: int,
        play: Any = None,
    ) -> None:
        self.trajectory_id, self.group, self.weight_step, self.play = trajectory_id, group, weight_step, play
        self.turns: Sequence[int] = turns
        self.turn = 0
        self.remaining = float(turns[0])
        self.context = self.uncached = float(prompt_tokens)
        self.end = self.offset = 0.0
        self.ticket = -1
        self.away = False  # with the environment
        self.moves, self.versions, self.granted, self.started = 0, 1, 0.0, 0.0
        # the replica that it belongs to; None = with nobody, waits to be given out again
        self.home: Any = None

    def restart(self, prompt_tokens: int, weight_step: int) -> float:
        """Back to the prompt, on other weights; gives the generated tokens that are thrown away."""
        lost = sum(self.turns[: self.turn]) + self.turns[self.turn] - self.remaining
        if self.play is not None:
            self.turns = self.play.anew()
        self.turn, self.remaining, self.weight_step = 0, float(self.turns[0]), weight_step
        self.context = self.uncached = float(prompt_tokens)
        return lost
