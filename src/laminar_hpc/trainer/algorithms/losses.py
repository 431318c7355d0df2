"""Policy losses per token. Pure; called by objective.py on one micro-batch.

Every loss has one signature, which a function of the user's own (`algorithm.loss=MODULE.FUNCTION`) has too:

    loss(a, logprobs, old, tokens) -> TokenLosses

a: the settings of `algorithm`, its own under a.options; logprobs (with gradient), old: float32 [tokens];
tokens: advantages and more, see tokens.py. r = exp(logprob - old) is the importance ratio; A the advantage;
sg stops the gradient. `old` are the log-probs of the policy that config.algorithm.proximal names: the one
that generated the token as its engine reported it, or the one at the start of the step. What a token gets may
depend on the tokens of its own trajectory alone, which are never in two micro-batches.

Non-finite values: nothing is clamped or replaced. A ratio that overflows, or an old log-prob that is not
finite, makes the gradient non-finite; the learner then skips that update and counts it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.objectives import option
from laminar_hpc.trainer.algorithms.named import found_in
from laminar_hpc.trainer.algorithms.tokens import Tokens

_DPPO_LARGEST = 20.0  # of a ratio


@dataclass(frozen=True)
class TokenLosses:
    """Both float32 [tokens]; only `loss` carries a gradient. `clipped` is 1 where the clip decides the
    token's loss: its gradient is 0 then (clip, gspo), or its weight is the bound (cispo, aipo)."""

    loss: torch.Tensor
    clipped: torch.Tensor


Loss = Callable[[AlgorithmConfig, torch.Tensor, torch.Tensor, Tokens], TokenLosses]


def policy_loss(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """The loss that a.loss names."""
    loss: Loss = found_in(LOSSES, "loss", a.loss)
    return loss(a, logprobs, old, tokens)


def clip(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """DAPO's objective per token with clip-higher, arXiv 2503.14476 equation 8: -min(r A, clip(r, 1 - low, 1
    + high) A); low = high is PPO's, arXiv 1707.06347 equation 7.

    With a.clip_dual (above 1 + high) dual clip, arXiv 1912.09729, "Dual-clip PPO": where A < 0 the objective
    is no less than dual A.
    """
    return _clipped(a, torch.exp(logprobs - old), tokens.advantages, a.clip_dual)


def gspo(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """GSPO, arXiv 2507.18071 equations 5 and 7: the clip of `clip` on the sequence's ratio s = (pi(y) /
    old(y))^(1 / |y|), the geometric mean of the ratios of its trained tokens. Every token carries its
    sequence's loss, so that their mean is the sequence's."""
    return _clipped(a, torch.exp(tokens.sequence_means(logprobs - old)), tokens.advantages, None)


def cispo(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """CISPO, arXiv 2506.13585 equations 4 and 5: -sg(clip(r, 1 - low, 1 + high)) A logprob. The weight is
    clipped, no token loses its gradient; low = 1 is no lower bound, as in the paper's runs."""
    return _weighted(logprobs, old, tokens.advantages, 1 - a.clip_low, 1 + a.clip_high)


def aipo(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """AIPO of LlamaRL, arXiv 2505.24034: -sg(min(pi / mu, largest)) A logprob, with mu the policy that
    generated the token, truncated on one side only."""
    assert a.importance_weight_cap is not None  # config/rules.py has seen to it
    return _weighted(logprobs, old, tokens.advantages, 0.0, a.importance_weight_cap)


def dppo(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """DPPO with the binary total variation, arXiv 2602.04879: -sg(min(r, 20)) A logprob, but 0 where the
    probability of the token has left the trust region in the direction of A: p - p_old > clip_high with A >
    0, or p - p_old < -clip_low with A < 0. An unlikely token may change its ratio by much, a likely one only
    by little. The bound of 20 is verl's."""
    change = torch.exp(logprobs.detach()) - torch.exp(old)
    left = torch.where(tokens.advantages > 0, change > a.clip_high, change < -a.clip_low)
    free = _weighted(logprobs, old, tokens.advantages, 0.0, _DPPO_LARGEST)
    return TokenLosses(free.loss.where(~left, 0.0), left.float())


def sapo(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """SAPO, arXiv 2511.20347 equations 5 and 6: -sigmoid(t (r - 1)) 4 / t A, a clip without an edge, with the
    temperature t of good tokens (A > 0) or of bad ones: options sapo_temperature_good and _bad. Nothing is
    counted as clipped."""
    good, bad = (option(a.options, "sapo", f"sapo_temperature_{of}") for of in ("good", "bad"))
    temperature = torch.where(tokens.advantages > 0, good, bad)
    gate = torch.sigmoid(temperature * (torch.exp(logprobs - old) - 1)) * 4 / temperature
    return TokenLosses(-gate * tokens.advantages, torch.zeros_like(old))


def gmpo(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """GMPO, arXiv 2507.20673 equation 4: -A times the geometric mean over the sequence of its tokens' ratios,
    each clipped to [e^-low, e^high] where A pulls it further out; low and high are clip_low and clip_high, in
    the paper 0.4. Every token carries its sequence's loss, as in `gspo`."""
    x, good = logprobs - old, tokens.advantages > 0
    bounded = x.clamp(-a.clip_low, a.clip_high)
    each = torch.where(good, torch.minimum(x, bounded), torch.maximum(x, bounded))
    return TokenLosses(
        -torch.exp(tokens.sequence_means(each)) * tokens.advantages, (each != x).detach().float()
    )


def _clipped(
    a: AlgorithmConfig, ratio: torch.Tensor, advantages: torch.Tensor, dual: float | None
) -> TokenLosses:
    free, bounded = ratio * advantages, ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantages
    objective, clipped = torch.minimum(free, bounded), bounded < free
    if dual is not None:
        floor = dual * advantages
        cut = (advantages < 0) & (objective < floor)
        objective, clipped = torch.where(cut, floor, objective), clipped | cut
    return TokenLosses(-objective, clipped.float())


def _weighted(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, smallest: float, largest: float
) -> TokenLosses:
    ratio = torch.exp(logprobs.detach() - old)
    weight = ratio.clamp(smallest, largest)
    return TokenLosses(-weight * advantages * logprobs, (weight != ratio).float())


LOSSES: dict[str, Loss] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "aipo": aipo,
    "dppo": dppo,
    "sapo": sapo,
    "gmpo": gmpo,
}
