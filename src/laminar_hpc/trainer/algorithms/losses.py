"""Policy losses per token. Pure; called by objective.py on one micro-batch.

r = exp(logprob - old) is the importance ratio; A the advantage; sg stops the gradient. `old` are the
log-probs of the policy that config.algorithm.proximal names: the one that generated the token as its engine
reported it, or the one at the start of the step.

Non-finite values: nothing is clamped or replaced. A ratio that overflows, or an old log-prob that is not
finite, makes the gradient non-finite; the learner then skips that update and counts it.
"""

from dataclasses import dataclass

import torch

from laminar_hpc.config.schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.tokens import Tokens


@dataclass(frozen=True)
class TokenLosses:
    """Both float32 [tokens]; only `loss` carries a gradient. `clipped` is 1 where the clip decides the
    token's loss: its gradient is 0 then (clip, gspo), or its weight is the bound (cispo, aipo)."""

    loss: torch.Tensor
    clipped: torch.Tensor


def policy_loss(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """The loss that `a` names. logprobs (with gradient), old: float32 [tokens]."""
    if a.loss == "gspo":
        return gspo(logprobs, old, tokens, a.clip_low, a.clip_high)
    if a.loss == "cispo":
        return cispo(logprobs, old, tokens.advantages, a.clip_low, a.clip_high)
    if a.loss == "aipo":
        assert a.importance_weight_cap is not None  # config/rules.py has seen to it
        return aipo(logprobs, old, tokens.advantages, a.importance_weight_cap)
    return clip(logprobs, old, tokens.advantages, a.clip_low, a.clip_high, a.clip_dual)


def clip(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> TokenLosses:
    """DAPO's objective per token with clip-higher, arXiv 2503.14476 equation 8: -min(r A, clip(r, 1 - low, 1
    + high) A); low = high is PPO's, arXiv 1707.06347 equation 7.

    With `dual` (above 1 + high) dual clip, arXiv 1912.09729, "Dual-clip PPO": where A < 0 the objective is no
    less than dual A.
    """
    return _clipped(torch.exp(logprobs - old), advantages, low, high, dual)


def gspo(logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens, low: float, high: float) -> TokenLosses:
    """GSPO, arXiv 2507.18071 equations 5 and 7: the clip of `clip` on the sequence's ratio s = (pi(y) /
    old(y))^(1 / |y|), the geometric mean of the ratios of its trained tokens. Every token carries its
    sequence's loss, so that their mean is the sequence's."""
    return _clipped(torch.exp(tokens.sequence_means(logprobs - old)), tokens.advantages, low, high, None)


def cispo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> TokenLosses:
    """CISPO, arXiv 2506.13585 equations 4 and 5: -sg(clip(r, 1 - low, 1 + high)) A logprob. The weight is
    clipped, no token loses its gradient; low = 1 is no lower bound, as in the paper's runs."""
    return _weighted(logprobs, torch.exp(logprobs.detach() - old), advantages, 1 - low, 1 + high)


def aipo(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, largest: float
) -> TokenLosses:
    """AIPO of LlamaRL, arXiv 2505.24034: -sg(min(pi / mu, largest)) A logprob, with mu the policy that
    generated the token, truncated on one side only."""
    return _weighted(logprobs, torch.exp(logprobs.detach() - behaviour), advantages, 0.0, largest)


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None
) -> TokenLosses:
    free, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    objective, clipped = torch.minimum(free, bounded), bounded < free
    if dual is not None:
        floor = dual * advantages
        cut = (advantages < 0) & (objective < floor)
        objective, clipped = torch.where(cut, floor, objective), clipped | cut
    return TokenLosses(-objective, clipped.float())


def _weighted(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, smallest: float, largest: float
) -> TokenLosses:
    weight = ratio.clamp(smallest, largest)
    return TokenLosses(-weight * advantages * logprobs, (weight != ratio).float())
