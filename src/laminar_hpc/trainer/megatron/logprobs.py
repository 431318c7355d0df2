"""Log-probs and entropy from logits whose vocabulary is padded and split over tensor-parallel ranks. Called
by trainer/megatron/policy.py."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

_ROWS = 1024  # the entropy's temporaries are of so many rows, not of the whole micro-batch


def mask_padding(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """Sets the columns behind the real vocabulary to -inf, in place: they get no probability and no gradient.
    logits [..., vocabulary / TP]."""
    columns = logits.shape[-1]
    real = min(columns, max(0, vocab - parallel_state.get_tensor_model_parallel_rank() * columns))
    if real < columns:
        logits[..., real:] = -torch.inf
    return logits


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [n, vocabulary / TP] float32, targets [n] int64 -> log-probs [n], with gradient. Overwrites
    `logits` (Megatron's kernel does)."""
    return -vocab_parallel_cross_entropy(logits, targets)


@torch.no_grad()
def entropy(logits: torch.Tensor) -> torch.Tensor:
    """logits [n, vocabulary / TP] float32, padding at -inf -> the entropy of each row in nats [n]."""
    group = parallel_state.get_tensor_model_parallel_group()
    split = group.size() > 1
    rows = []
    for part in logits.split(_ROWS):
        top = part.amax(-1, keepdim=True)
        if split:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = part - top
        weights = shifted.exp()
        # 0 * -inf would be nan
        sums = torch.stack([weights.sum(-1), (weights * shifted.clamp_(min=-1e4)).sum(-1)])
        if split:
            dist.all_reduce(sums, group=group)
        rows.append(sums[0].log() - sums[1] / sums[0])
    return torch.cat(rows) if rows else logits.new_zeros(0)
