"""Estimates of the KL divergence KL(policy || reference) from one sampled token. Pure.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with q the policy, p the
reference and r = p / q: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. k3 as a loss is GRPO's, arXiv
2402.03300 equation 4. As a loss the gradient of k2 is that of the reverse KL on policy, that of k1 has mean
0, arXiv 2506.09477; that of k3 is of the forward KL(reference || policy), 1 - r per token, which grows like
e^(log r). So k3 has a largest value, at which its gradient ends: the clamp of verl, slime and NeMo RL.
For tokens of an older policy k3_weighted takes k3 times pi / q, with the gradient of both: DeepSeek-V3.2's
unbiased estimate, arXiv 2512.02556 section 3.1, whose gradient is that of the reverse KL.
"""

import math

import torch


def kl_estimate(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    estimator: str,
    k3_max: float | None = None,
    old: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per token, with gradient where `logprobs` has one. All [tokens], in nats; estimator k1, k2, k3 or
    k3_weighted, which needs `old`, the log-probs that ratios are taken to. Where k3 would exceed `k3_max` it
    is `k3_max` and has no gradient; None: no bound."""
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if k3_max is None:
        k3 = torch.expm1(log_r) - log_r
    else:
        log_r = log_r.clamp(max=80)  # beyond any bound, and finite: a gradient of 0 must not meet infinity
        k3 = (torch.expm1(log_r) - log_r).clamp(max=k3_max)
    if estimator == "k3":
        return k3
    assert old is not None
    return k3 * torch.exp(logprobs - old)


def steered(coefficient: float, kl: float, target: float) -> float:
    """The coefficient of the next step, D. Ziegler et al., arXiv 1909.08593 section 2.2: it grows by a tenth
    of the relative error of this step's KL, which counts as 20 % at most. A KL that is not finite changes
    nothing."""
    error = kl / target - 1
    return coefficient * (1 + 0.1 * min(0.2, max(-0.2, error))) if math.isfinite(error) else coefficient
