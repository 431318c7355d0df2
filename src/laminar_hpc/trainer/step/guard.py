"""The divergence guard on the trainer's side: it takes trajectories out of a micro-batch's loss, and gives
policies/divergence.py the figures of a mini-batch before its update. Called by trainer/step/learner.py.

Tensor- and context-parallel ranks compute the same log-probs, so each leaves the same trajectories out. What
is decided of an update is decided from figures that all ranks have exchanged, so all decide the same.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from laminar_hpc.config.learning_schema import GuardConfig
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.policies.divergence import Divergence, Guarded, GuardLimits
from laminar_hpc.trainer.algorithms.tokens import Tokens
from laminar_hpc.trainer.step.parallel import largest_of_ranks


@dataclass
class GuardReport:
    """What the guard has done in a step. `left_out`: trajectory id -> why; `skipped` updates; `skip`: the
    newest reason why one was, `stop`: why the run ends; or ""."""

    left_out: dict[int, str] = field(default_factory=dict)
    skipped: int = 0
    skip: str = ""
    stop: str = ""

    def and_then(self, later: "GuardReport") -> "GuardReport":
        """This one, and what was done later in the same step."""
        return GuardReport(
            self.left_out | later.left_out,
            self.skipped + later.skipped,
            later.skip or self.skip,
            later.stop or self.stop,
        )


def trajectory_figures(tokens: Tokens, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each trajectory [trajectories, at least 1], by the policy's log-probs [tokens] without gradient: the
    mean |log-prob by the trainer - by the engine| over its trained tokens, and the largest log ratio, which
    is infinite for a token without one."""
    log_ratio = logprobs - tokens.behaviour
    count = tokens.sequence_sums(tokens.real)
    mismatch = tokens.sequence_sums(log_ratio.abs()) / count.clamp(min=1)
    known = log_ratio.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    largest = torch.full_like(mismatch, -torch.inf).scatter_reduce(0, tokens.sequence, known, "amax")
    return mismatch, largest


class Guard:
    """Of one learner. `report`: of the step under way."""

    def __init__(self, settings: GuardConfig) -> None:
        s = settings
        self._policy = Divergence(s.mismatch_max, s.ratio_max, s.spread, s.window, s.skip_share, s.stop_after)
        self._enabled = s.enabled
        self._limits: GuardLimits = self._policy.limits
        self.report = GuardReport()

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return self._policy.state

    def take_state(self, state: Mapping[str, Any]) -> None:
        """After a load."""
        self._policy.take_state(state)
        self._limits = self._policy.limits

    def mask(
        self, tokens: Tokens, logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[Tokens, torch.Tensor, torch.Tensor]:
        """What the objective gets of a micro-batch: of trajectories beyond the limits constants, at which
        every loss has no gradient and no value is NaN. All float32 [tokens]."""
        if not self._enabled:
            return tokens, logprobs, entropies
        mismatch, largest = trajectory_figures(tokens, logprobs.detach())
        kept = (mismatch <= self._limits.mismatch) & (largest <= self._limits.log_ratio)
        out = ~kept[tokens.sequence] & (tokens.real > 0)

        def cleared(values: torch.Tensor) -> torch.Tensor:
            return values.masked_fill(out, 0.0)

        masked = replace(
            tokens,
            behaviour=cleared(tokens.behaviour),
            proximal=cleared(tokens.proximal),
            reference=None if tokens.reference is None else cleared(tokens.reference),
            advantages=cleared(tokens.advantages),
            likelihood=None if tokens.likelihood is None else cleared(tokens.likelihood),
            left_out=out,
        )
        return masked, cleared(logprobs), cleared(entropies)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step under way; nothing where the guard is off."""
        done = self.report
        own = {"guard_left_out": float(len(done.left_out)), "guard_skipped_updates": float(done.skipped)}
        return own if self._enabled else {}

    def begin(self) -> None:
        """A step, or with consumption as a stream a part of one."""
        self.report = GuardReport()

    def allows(
        self,
        step: int,
        records: Sequence[Trajectory],
        figures: torch.Tensor,
        sums: Callable[[], Mapping[str, float]],
        has_reference: bool,
    ) -> bool:
        """Whether the update of a mini-batch may be made; the same on all ranks. Collective.

        records: its trajectories; figures [2, trajectories] of those that this rank knows, as
        `trajectory_figures` gives them, and 0 of the others; sums: by the names of objective.SUMS, of all
        ranks.
        """
        if not self._enabled:
            return True
        known = figures.clamp(min=0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        each = zip(records, *largest_of_ranks(known).tolist(), strict=True)
        trajectories = [Guarded(t.trajectory_id, *figures) for t, *figures in each]
        rewards = [t.reward for t in records]
        error = statistics.pstdev(rewards) / len(rewards) ** 0.5
        verdict = self._policy.judge(step, trajectories, _figures(rewards, sums(), has_reference), error)
        self._limits = self._policy.limits
        done = GuardReport(verdict.left_out, int(bool(verdict.skip)), verdict.skip, verdict.stop)
        self.report = self.report.and_then(done)
        return not verdict.skip


def _figures(rewards: Sequence[float], sums: Mapping[str, float], has_reference: bool) -> dict[str, float]:
    """As policies/divergence.py names them."""
    tokens, kept = max(sums["tokens"], 1.0), max(sums["kept"], 1.0)
    figures = {
        "ratio": sums["ratio"] / kept if sums["kept"] else 1.0,
        "entropy": sums["entropy"] / tokens,
        "reward": statistics.fmean(rewards),
    }
    return figures | ({"kl": sums["kl"] / tokens} if has_reference else {})
