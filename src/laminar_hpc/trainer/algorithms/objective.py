"""The whole objective of one micro-batch: policy loss x behaviour weight over the trajectories kept, + KL.
Pure; called by trainer/step/learner.py.

    loss_t = kept_t * weight_t * policy_loss(pi / q, A)_t          by corrections.py and losses.py
             + kl_coefficient * KL(pi || reference)_t - entropy_coefficient * H(pi)_t
             + coefficient * D(pi, teacher)_t                         given as `beside`
             - likelihood_t * log pi_t     of right answers and demonstrations, with their own denominators
"""

from dataclasses import dataclass

import torch

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.corrections import corrected
from laminar_hpc.trainer.algorithms.kl import kl_estimate
from laminar_hpc.trainer.algorithms.loss_aggregation import weights_and_count
from laminar_hpc.trainer.algorithms.losses import policy_loss
from laminar_hpc.trainer.algorithms.tokens import Tokens

# Rows of Objective.sums: the loss; its denominator; then sums over trained tokens.
SUMS = (
    "loss",
    "count",
    "tokens",
    "kept",
    "ratio",
    "clipped",
    "entropy",
    "kl",
    "kl_bounded",
    "truncated",
    "beside",
)


@dataclass(frozen=True)
class Objective:
    """`total` (with gradient) is the weighted sum of the token losses, `count` (int32) its part of the
    denominator. `sums` float32 [len(SUMS)]; `ratio` is current / behaviour and, like `clipped` and
    `truncated`, of the tokens kept; `largest_ratio` is theirs."""

    total: torch.Tensor
    count: torch.Tensor
    sums: torch.Tensor
    largest_ratio: torch.Tensor


def objective(
    a: AlgorithmConfig,
    max_response_tokens: int,
    tokens: Tokens,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    beside: torch.Tensor | None = None,
) -> Objective:
    """logprobs and entropies, with gradient: of the policy as it is, float32 [tokens]; `beside` as they are:
    added to each token's loss."""
    now = logprobs.detach()
    correction = corrected(a, now, tokens)
    kept, bounded_weights = correction.kept, correction.bounded
    assert kept is not None and bounded_weights is not None
    # What is left out gets ratios of 1, since even one that overflows must not reach the gradient.
    proximal, behaviour = torch.where(kept, tokens.proximal, now), torch.where(kept, tokens.behaviour, now)
    policy = policy_loss(a, logprobs, proximal, tokens)
    losses = policy.loss
    if correction.weights is not None:
        losses = losses * correction.weights.where(kept, 1.0)
    losses, kl, bounded = losses * kept, torch.zeros_like(now), torch.zeros_like(now)
    if tokens.reference is not None:
        estimate = kl_estimate(logprobs, tokens.reference, a.kl_estimator, a.kl_k3_max, proximal)
        kl = estimate.detach()
        if a.kl_estimator.startswith("k3") and a.kl_k3_max is not None:
            bounded = (kl_estimate(now, tokens.reference, "k3", a.kl_k3_max) >= a.kl_k3_max).float()
        if not a.kl_in_reward:
            losses = losses + a.kl_coefficient * estimate
    if a.entropy_coefficient > 0:
        losses = losses - a.entropy_coefficient * entropies
    if beside is not None:
        losses = losses + beside
    weights, count = weights_and_count(tokens, a.loss_aggregation, max_response_tokens)
    total = (losses * weights).sum()
    if tokens.likelihood is not None:
        total = total - (tokens.likelihood * logprobs).sum()
    with torch.no_grad():
        real = tokens.real if tokens.left_out is None else tokens.real * ~tokens.left_out
        mask, ratio = real * kept, torch.exp(now - behaviour)
        each = torch.stack(
            [
                mask,
                ratio * mask,
                policy.clipped * mask,
                entropies * real,
                kl * real,
                bounded * real,
                bounded_weights * mask,
                torch.zeros_like(real) if beside is None else beside * real,
            ]
        )
        sums = torch.cat([torch.stack([total, count.to(total.dtype), real.sum()]), each.sum(1)])
        largest = (ratio * mask).max() if len(ratio) else total.new_zeros(())
    return Objective(total, count, sums, largest)
