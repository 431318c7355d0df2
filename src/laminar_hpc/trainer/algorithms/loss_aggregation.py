"""What a mini-batch's loss is divided by. Pure; called by objective.py on one micro-batch.

A micro-batch gives a sum of token losses, each times its weight, and a count; the gradients of all
micro-batches of all data-parallel ranks are added up and divided once by the sum of the counts (Megatron's
calculate_per_token_loss). So the division is by a number of the whole mini-batch, however it is cut into
micro-batches and ranks. Tokens that a mask leaves out still count.
"""

import torch

from laminar_hpc.trainer.algorithms.tokens import Tokens


def weights_and_count(
    tokens: Tokens, loss_aggregation: str, max_response_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> weights float32 [tokens] and the count, an int32 scalar.

    tokens: the mean over all trained tokens, DAPO's token-level loss, arXiv 2503.14476 equation 12.
    sequences: the mean over trajectories of each one's mean over its tokens, GRPO's, arXiv 2402.03300
    equation 3. constant: the sum over (trajectories x max_response_tokens), Dr. GRPO's without a bias by
    length, arXiv 2503.20783 section 3.2.
    """
    if loss_aggregation == "tokens":
        return tokens.real, tokens.real.sum().to(torch.int)
    count = torch.tensor(tokens.sequences, dtype=torch.int, device=tokens.real.device)
    if loss_aggregation == "constant":
        return tokens.real / max_response_tokens, count
    return tokens.real / tokens.sequence_sums(tokens.real).clamp(min=1)[tokens.sequence], count


def likelihood_weights(right: torch.Tensor, tokens: torch.Tensor, loss_aggregation: str) -> torch.Tensor:
    """Weights [trajectories of the mini-batch] of the tokens of each in the likelihood of right answers,
    VAPO, arXiv 2504.05118 section 4.3: the mean over their tokens, whichever denominator the loss has.

    right float64, tokens int64 [trajectories]: of each its accuracy, and its trained tokens. All zeros
    where none is right.
    """
    count = tokens.sum() if loss_aggregation == "tokens" else torch.tensor(len(tokens))
    return right * count / (right * tokens).sum().clamp(min=1e-9)
