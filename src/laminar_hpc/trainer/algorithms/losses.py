"""Policy losses per token. Pure; called by trainer/learner.py on one micro-batch, summed there and divided by Megatron over the whole
mini-batch.

Non-finite values: nothing is clamped or replaced. A ratio that overflows, or a behaviour log-prob that is not finite, makes the gradient
non-finite; the learner then skips that update and counts it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLosses:
    """All float32 [tokens]; only `loss` carries a gradient. `clipped` is 1 where the clip is what the minimum chose, so the token's
    gradient is 0."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


def clip_higher(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> TokenLosses:
    """DAPO's objective per token, arXiv 2503.14476 equation 8: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob -
    behaviour).

    The denominator of r is the probability under the policy that generated the token, as its engine reported it. All inputs float32
    [tokens].
    """
    ratio = torch.exp(logprobs - behaviour_logprobs)
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return TokenLosses(-torch.minimum(free, clipped), ratio.detach(), (clipped < free).float())
