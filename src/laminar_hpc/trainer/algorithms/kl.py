"""Estimates of the KL divergence KL(policy || reference) from one sampled token. Pure.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with q the policy, p the
reference and r = p / q: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. k3 as a loss is GRPO's, arXiv
2402.03300 equation 4. As a loss the gradient of k2 is that of the reverse KL on policy, that of k1 has mean
0, arXiv 2506.09477; that of k3 is of the forward KL(reference || policy), 1 - r per token, which grows like
e^(log r). So k3 has a largest value, at which its gradient ends: the clamp of verl, slime and NeMo RL. No
importance weights correct for tokens of older policies.
"""

import torch


def kl_estimate(
    logprobs: torch.Tensor, reference: torch.Tensor, estimator: str, k3_max: float | None = None
) -> torch.Tensor:
    """Per token, with gradient where `logprobs` has one. All [tokens], in nats; estimator k1, k2 or k3. Where
    k3 would exceed `k3_max` it is `k3_max` and has no gradient; None: no bound."""
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if k3_max is None:
        return torch.expm1(log_r) - log_r
    log_r = log_r.clamp(max=80)  # beyond any bound, and finite: a gradient of 0 must not meet infinity
    return (torch.expm1(log_r) - log_r).clamp(max=k3_max)
