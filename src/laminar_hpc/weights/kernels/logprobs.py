"""Log-probs and entropy from float32 logits in the fewest passes over them: a row of logits is read once for
all that they need, and once more for the gradient, which comes in the dtype that the products want.

The functions here choose: logits on a GPU go to triton_logprobs.py, all others to plain torch, which is the
kernels' reference. `places` are the columns of the wanted tokens, negative where another tensor-parallel rank
has them; columns from `real` on are padding, without probability or gradient.
"""

from typing import NamedTuple

import torch

_ROWS = 1024  # plain torch's temporaries are of so many rows
LEAST = -1e30  # the greatest logit of a rank that has only padding: finite, as 0 * -inf is NaN


class EntropySlope(NamedTuple):
    """The rows' entropies, and the gradient of what is made of them by each; float32 [rows] both."""

    entropies: torch.Tensor
    upstream: torch.Tensor


def summary(logits: torch.Tensor, places: torch.Tensor, real: int, temperature: float) -> torch.Tensor:
    """logits [rows, columns] float32, places [rows] int64 -> float32 [4, rows]: with x = logits / temperature
    the greatest x, the sums of w = exp(x - greatest) and of w * (x - greatest), and the wanted x, 0 where it
    is not here."""
    if logits.is_cuda:
        from laminar_hpc.weights.kernels.triton_logprobs import summary as on_gpu

        return on_gpu(logits, places, real, temperature)
    parts = zip(logits.split(_ROWS), places.split(_ROWS), strict=True)
    return torch.cat([_summary(rows[:, :real], wanted, temperature) for rows, wanted in parts], 1)


def _summary(logits: torch.Tensor, places: torch.Tensor, temperature: float) -> torch.Tensor:
    found = logits.new_zeros(4, len(logits))
    found[0] = LEAST
    if logits.shape[1]:
        x = logits / temperature
        found[3] = x.gather(1, places.clamp(min=0)[:, None])[:, 0] * (places >= 0)
        found[0] = x.amax(-1)
        weights = x.sub_(found[0, :, None]).exp()
        found[1] = weights.sum(-1)
        found[2] = weights.mul_(x).sum(-1)
    return found


def gradient(
    logits: torch.Tensor,
    places: torch.Tensor,
    real: int,
    temperature: float,
    normalizers: torch.Tensor,
    upstream: torch.Tensor,
    entropy: EntropySlope | None,
    out: torch.Tensor,
) -> None:
    """Into `out` [rows, columns], of any float dtype, the gradient of the logits, which are overwritten and
    may be `out`: (onehot - p) * upstream / temperature with p = exp(x - normalizer), both vectors float32
    [rows]; of an `entropy` H, too: -p (log p + H) * its upstream / temperature."""
    if logits.is_cuda:
        from laminar_hpc.weights.kernels.triton_logprobs import gradient as on_gpu

        return on_gpu(logits, places, real, temperature, normalizers, upstream, entropy, out)
    found = logits[:, :real].div_(temperature).sub_(normalizers[:, None])
    if entropy is None:
        found.exp_().mul_(-upstream[:, None])
    else:
        vectors = (upstream, entropy.entropies, entropy.upstream)
        for rows, *of_rows in zip(*(x.split(_ROWS) for x in (found, *vectors)), strict=True):
            from_above, entropies, slope = (vector[:, None] for vector in of_rows)
            factor = (rows + entropies).mul_(slope).add_(from_above)
            rows.exp_().mul_(factor.neg_())
    if real:
        found.scatter_add_(1, places.clamp(min=0)[:, None], (upstream * (places >= 0))[:, None])
    out[:, :real] = found.div_(temperature)
    out[:, real:] = 0
