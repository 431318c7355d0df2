"""What an engine is asked for, and the two engines' rules for admitting it."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
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
        ratios = (c.new_token_ratio, c.new_token_ratio_min, c.new_token_ratio_steps, c.retract_steps)
        return EngineAdmission(longest, clip, *ratios)

    @property
    def reserve_min(self) -> float:
        """Tokens that are kept free for each running request at least."""
        return self.ratio_min * self.clip


@dataclass(slots=True, eq=False, repr=False)
class SimulatedRequest:
    """A trajectory on its way. `context`: its tokens so far, `uncached`: those without KV; both are
    meaningful only while it does not run. `turns`: drawn tokens of each. `play`: what a trajectory of several
    turns has with its environment (turns/environments.py), None for one turn."""

    trajectory_id: int
    group: Any
    turns: Sequence[int]
    prompt_tokens: InitVar[float]
    weight_step: int
    play: Any = None
    turn: int = 0
    remaining: float = field(init=False)
    context: float = field(init=False)
    uncached: float = field(init=False)
    end: float = 0.0
    offset: float = 0.0
    ticket: int = -1
    away: bool = False  # with the environment
    moves: int = 0
    versions: int = 1
    granted: float = 0.0
    started: float = 0.0
    home: Any = None  # the replica that it belongs to; None = it waits to be given out again

    def __post_init__(self, prompt_tokens: float) -> None:
        self._begin(prompt_tokens)

    def _begin(self, prompt_tokens: float) -> None:
        self.turn = 0
        self.remaining = float(self.turns[0])
        self.context = self.uncached = float(prompt_tokens)

    def restart(self, prompt_tokens: int, weight_step: int) -> float:
        """Back to the prompt, on other weights; gives the generated tokens that are thrown away."""
        lost = sum(self.turns[: self.turn]) + self.turns[self.turn] - self.remaining
        if self.play is not None:
            self.turns = self.play.anew()
        self.weight_step = weight_step
        self._begin(prompt_tokens)
        return lost
