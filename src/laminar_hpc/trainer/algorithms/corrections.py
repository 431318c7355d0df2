"""Corrections for tokens that another policy than the trained one has generated. Pure; called by objective.py
on one micro-batch."""

import torch

from laminar_hpc.trainer.algorithms.tokens import Tokens


def behaviour_weights(proximal: torch.Tensor, behaviour: torch.Tensor, largest: float | None) -> torch.Tensor:
    """min(q / mu, largest), which multiplies a loss whose ratio is pi / q, with q the proximal and mu the
    behaviour policy. No gradient.

    Without a bound decoupled PPO's, arXiv 2110.00641 and, for asynchronous RL, AReaL's, arXiv 2505.24298
    section 5.2; with one, about 2, truncated importance sampling (TIS): F. Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl, 2025), after
    IMPALA's weights, arXiv 1802.01561 section 4.1. All float32 [tokens].
    """
    ratio = torch.exp(proximal - behaviour)
    return ratio if largest is None else ratio.clamp(max=largest)


def kept_sequences(
    tokens: Tokens, logprobs: torch.Tensor, smallest: float | None, largest: float | None
) -> torch.Tensor:
    """bool [tokens]: false for all tokens of a trajectory whose ratios to the behaviour policy have a
    geometric mean outside [smallest, largest] (None: no bound).

    The geometric sequence mask of J. Liu, Y. Li et al., "When Speed Kills Stability: Demystifying RL Collapse
    from the Training-Inference Mismatch" (2025). logprobs [tokens] are those of the numerator, without
    gradient. A mean that is NaN is kept, so that the learner sees it.
    """
    mean = torch.exp(tokens.sequence_means(logprobs - tokens.behaviour))
    kept = torch.ones_like(mean, dtype=torch.bool)
    if smallest is not None:
        kept &= ~(mean < smallest)
    if largest is not None:
        kept &= ~(mean > largest)
    return kept
