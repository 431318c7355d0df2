"""Corrections for tokens that another policy than the trained one has generated. Pure; called by objective.py
on one micro-batch.

Every correction has one signature, which a function of the user's own (in `algorithm.corrections`) has too:

    correction(a, logprobs, tokens) -> Correction

a: the settings of `algorithm`, its own under a.options; logprobs: float32 [tokens] of the policy as it is,
without gradient; tokens: those of the engine, of the proximal policy and more, see tokens.py. What a token
gets may depend on the tokens of its own trajectory alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.objectives import option
from laminar_hpc.trainer.algorithms.named import found_in
from laminar_hpc.trainer.algorithms.tokens import Tokens


@dataclass(frozen=True)
class Correction:
    """None, or [tokens] each: `weights` float32 multiply the token losses; `kept` bool is false where a token
    has no policy loss at all; `bounded` bool, for the metrics: the weight is another than the ratio."""

    weights: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    bounded: torch.Tensor | None = None


CorrectionFunction = Callable[[AlgorithmConfig, torch.Tensor, Tokens], Correction]


def corrected(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """All of a.corrections and of the keys for the sequence mask, multiplied; with proximal=recomputed and no
    other weights `behaviour_weights`. Its `kept` and `bounded` are not None."""
    functions: list[CorrectionFunction] = [
        found_in(CORRECTIONS, "corrections", name) for name in a.corrections
    ]
    each = [function(a, logprobs, tokens) for function in (sequence_mask, *functions)]
    if a.proximal == "recomputed" and all(one.weights is None for one in each):
        each.append(_decoupled(a, logprobs, tokens))
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    bounded = torch.zeros_like(kept)
    for one in each:
        kept = kept if one.kept is None else kept & one.kept
        bounded = bounded if one.bounded is None else bounded | one.bounded
    weights = [one.weights for one in each if one.weights is not None]
    return Correction(torch.stack(weights).prod(0) if weights else None, kept, bounded)


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


def _decoupled(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    weights = behaviour_weights(tokens.proximal, tokens.behaviour, a.importance_weight_cap)
    return Correction(weights, bounded=weights < torch.exp(tokens.proximal - tokens.behaviour))


def sequence_mask(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """`kept_sequences` by the keys sequence_ratio_min and sequence_ratio_max, of the ratios of the proximal
    policy where it is recomputed, else of the policy as it is."""
    if a.sequence_ratio_min is None and a.sequence_ratio_max is None:
        return Correction()
    numerator = tokens.proximal if a.proximal == "recomputed" else logprobs
    return Correction(kept=kept_sequences(tokens, numerator, a.sequence_ratio_min, a.sequence_ratio_max))


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


def tis(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """Two-sided truncated importance sampling: clamp(q / mu, floor, cap) per token, with the option
    importance_weight_floor and the key importance_weight_cap; without a floor `behaviour_weights`."""
    return _truncated(a, "tis", tokens.proximal - tokens.behaviour)


def icepop(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """IcePop, Ring-1T, arXiv 2510.18855 section 3.2: q / mu inside [floor, cap], and no loss for a token
    outside. A ratio that is NaN is kept, so that the learner sees it."""
    return _masked(a, "icepop", tokens.proximal - tokens.behaviour)


def sequence_tis(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """As `tis` with the ratio of the whole trajectory, the product of its tokens' (Liu, Li et al. 2025, as
    in `kept_sequences`): unbiased where not truncated, and of a variance that grows with the length."""
    return _truncated(a, "sequence_tis", _of_trajectories(tokens))


def sequence_icepop(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """As `icepop` with the ratio of the whole trajectory."""
    return _masked(a, "sequence_icepop", _of_trajectories(tokens))


def opsm(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556 section 3.1: leaves out a bad trajectory
    (A < 0) from which the policy has moved away, mean(log mu - log pi) > the option opsm_divergence."""
    moved = tokens.sequence_means(tokens.behaviour - logprobs)
    far = moved > option(a.options, "opsm", "opsm_divergence")
    return Correction(kept=~(far & (tokens.advantages < 0)))


def overlong_filter(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """DAPO's overlong filtering, arXiv 2503.14476 section 3.4: leaves out a trajectory that was cut at
    sampling.max_response_tokens, whose reward says little of its reasoning."""
    assert tokens.truncated is not None
    return Correction(kept=tokens.truncated == 0)


def _of_trajectories(tokens: Tokens) -> torch.Tensor:
    return tokens.sequence_sums(tokens.proximal - tokens.behaviour)[tokens.sequence]


def _bounds(a: AlgorithmConfig, name: str) -> tuple[float, float]:
    assert a.importance_weight_cap is not None  # config/rules.py has seen to it
    return option(a.options, name, "importance_weight_floor"), a.importance_weight_cap


def _truncated(a: AlgorithmConfig, name: str, log_ratio: torch.Tensor) -> Correction:
    ratio = torch.exp(log_ratio)
    weights = ratio.clamp(*_bounds(a, name))
    return Correction(weights, bounded=weights != ratio)


def _masked(a: AlgorithmConfig, name: str, log_ratio: torch.Tensor) -> Correction:
    ratio, (smallest, largest) = torch.exp(log_ratio), _bounds(a, name)
    return Correction(ratio, kept=~((ratio < smallest) | (ratio > largest)))


CORRECTIONS: dict[str, CorrectionFunction] = {
    "tis": tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_icepop": sequence_icepop,
    "opsm": opsm,
    "overlong_filter": overlong_filter,
}
