"""The divergence of the policy's token distributions from a teacher's, over the whole vocabulary, chunk by
chunk beside the log-probs. Called by trainer/megatron/head.py.

With p of the policy, t of the teacher and m = (p + t) / 2, all at the sampling temperature, and x the
policy's logits over it:

    reverse   D = KL(p || t)                        dD/dx = p (log p - log t - D)
    forward   D = KL(t || p)                        dD/dx = p - t
    jsd       D = (KL(p || m) + KL(t || m)) / 2     dD/dx = p (log p - log m - KL(p || m)) / 2

R. Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649 section 3, with beta = 1/2.
The teacher's logits are made from its last hidden states, as the policy's are, and never are all of them
there at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from laminar_hpc.trainer.megatron.linear import Product
from laminar_hpc.weights.kernels.logprobs import LEAST

if TYPE_CHECKING:
    from laminar_hpc.trainer.megatron.head import VocabularyShard

Reduce = Callable[[torch.Tensor], torch.Tensor]  # the sum over tensor-parallel ranks, in place


class TeacherRows(NamedTuple):
    """Of a pack's targets: the teacher's last hidden states [trained, hidden] and, int64 [trained], which of
    `heads` [vocabulary / TP, hidden] makes logits of them; `divergence`: reverse, forward or jsd."""

    states: torch.Tensor
    which: torch.Tensor
    heads: Sequence[torch.Tensor]
    divergence: str


def value(divergence: str, log_p: torch.Tensor, log_t: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """log_p, log_t [rows, columns of this rank] -> D in nats [rows]."""
    if divergence == "reverse":
        return _kl(log_p, log_t, reduce)
    if divergence == "forward":
        return _kl(log_t, log_p, reduce)
    log_m = _mixed(log_p, log_t)
    return (_kl(log_p, log_m, reduce) + _kl(log_t, log_m, reduce)) / 2


def slope(divergence: str, log_p: torch.Tensor, log_t: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """dD/dx [rows, columns of this rank]."""
    if divergence == "forward":
        return log_p.exp() - log_t.exp()
    gap = log_p - (log_t if divergence == "reverse" else _mixed(log_p, log_t))
    p = log_p.exp()
    gap -= reduce((p * gap).sum(1))[:, None]
    return p.mul_(gap) if divergence == "reverse" else p.mul_(gap).div_(2)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    return reduce((log_a.exp() * (log_a - log_b)).sum(1))


def _mixed(log_p: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(log_p, log_t) - math.log(2)


class Comparison:
    """Of the rows of one pass with their teacher; `found` are the divergences of the chunks watched so
    far."""

    def __init__(self, shard: "VocabularyShard", teacher: TeacherRows, product: Product) -> None:
        self._shard = shard
        self._teacher = teacher
        self._product = product
        self.found: list[torch.Tensor] = []

    def watched(self, chunks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The policy's logits [rows, columns], chunk by chunk, as they are."""
        for number, logits in enumerate(chunks):
            both = self._logprobs(logits, number)
            self.found.append(value(self._teacher.divergence, *both, self._shard.reduce))
            yield logits

    def gradient(self, logits: torch.Tensor, number: int, upstream: torch.Tensor) -> torch.Tensor:
        """By the real columns of the logits of chunk `number`, [rows, real] float32. Collective."""
        found = slope(self._teacher.divergence, *self._logprobs(logits, number), self._shard.reduce)
        return found.mul_(upstream[:, None] / self._shard.temperature)

    def _logprobs(self, logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(number * self._shard.rows, number * self._shard.rows + len(logits))
        states, which = self._teacher.states[rows], self._teacher.which[rows]
        if len(self._teacher.heads) == 1:
            of_teacher = self._product(states, self._teacher.heads[0], None).float()
        else:
            of_teacher = torch.zeros_like(logits)
            for i, head in enumerate(self._teacher.heads):
                of_teacher[which == i] = self._product(states[which == i], head, None).float()
        return self._normalized(logits), self._normalized(of_teacher)

    def _normalized(self, logits: torch.Tensor) -> torch.Tensor:
        x = logits[:, : self._shard.real] / self._shard.temperature
        top = x.amax(1) if x.shape[1] else x.new_full((len(x),), LEAST)
        self._shard.reduce(top, dist.ReduceOp.MAX)
        total = self._shard.reduce((x - top[:, None]).exp().sum(1))
        return x.sub_((top + total.log())[:, None])
