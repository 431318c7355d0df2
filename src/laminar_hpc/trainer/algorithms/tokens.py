"""The trained tokens of a micro-batch, flat, with what the objective needs of each. Made by
trainer/step/microbatch.py."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """float32 [tokens] each, but `sequence` [tokens] int64: which of the micro-batch's `sequences`
    trajectories a token belongs to.

    `behaviour`, `proximal`, `reference`: log-probs by the engine, by the policy that ratios are taken to (the
    behaviour policy unless config.algorithm.proximal=recomputed), by the reference model (None without one).
    An empty micro-batch has one token that is not `real`, of no trajectory; elsewhere `real` is 1.

    Of the whole trajectory, at each of its tokens: `rewards` as they came; `right`, its accuracy (see
    policies/metrics.py); `truncated`, 1 where sampling.max_response_tokens ended it; `likelihood`, its weight
    in the mean log-likelihood of right answers.

    `left_out` bool: tokens that the guard has taken out (trainer/step/guard.py); they count in denominators
    alone.
    """

    behaviour: torch.Tensor
    proximal: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor
    sequence: torch.Tensor
    sequences: int
    real: torch.Tensor
    rewards: torch.Tensor | None = None
    right: torch.Tensor | None = None
    truncated: torch.Tensor | None = None
    likelihood: torch.Tensor | None = None
    left_out: torch.Tensor | None = None

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """values [tokens] -> their sum over each trajectory [sequences, at least 1]."""
        return values.new_zeros(max(1, self.sequences)).index_add(0, self.sequence, values)

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """values [tokens] -> at each token the mean over its trajectory's trained tokens [tokens]."""
        lengths = self.sequence_sums(torch.ones_like(values))
        return (self.sequence_sums(values) / lengths.clamp(min=1))[self.sequence]
