"""Log-probs and entropy of many tokens without all their logits: chunk by chunk of rows, from the last hidden
states, and once more in the backward pass. Called by trainer/megatron/policy.py where
config/models.py `head_in_chunks` says that this takes less memory.

32K tokens over a vocabulary of 152K are 20 GB of logits, and as much again for their gradient. Here at most
LOGITS_BYTES of them are there at once. The values are those of logprobs.py but for the order of sums; the
price is one product of the head more.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

from laminar_hpc.config.models import LOGITS_BYTES
from laminar_hpc.trainer.megatron.linear import Product
from laminar_hpc.trainer.megatron.logprobs import mask_padding

_COLUMNS = 8192  # of the vocabulary: whose weight gradient is computed at a time
_LEAST = -1e4  # in place of the logits of the padding, which are -inf: 0 * -inf would be NaN


class _Head:
    """The output layer of this tensor-parallel rank, and how its logits are made."""

    def __init__(self, weight: torch.Tensor, product: Product, temperature: float, vocab: int) -> None:
        self.weight = weight
        self.product = product
        self.temperature = temperature
        self.vocab = vocab
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        self.rows = max(1, LOGITS_BYTES // (4 * len(weight)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> [rows, vocabulary / TP] float32, at the temperature, padding at -inf."""
        raw = self.product(hidden, self.weight, None).float()
        return mask_padding(raw.div_(self.temperature), self.vocab)

    def place(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each target its column here, 0 where another rank has it; and whether it is here, as float32."""
        column = targets - self.first
        mine = (column >= 0) & (column < len(self.weight))
        return column.where(mine, 0), mine.float()

    def reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group.size() > 1:
            dist.all_reduce(x, op, group=self.group)
        return x


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, normalizers = [], [], []
        for part, wanted in zip(hidden.split(head.rows), targets.split(head.rows), strict=True):
            logits = head.logits(part)
            top = head.reduce(logits.amax(-1), dist.ReduceOp.MAX)
            column, mine = head.place(wanted)
            shifted = logits.sub_(top[:, None]).clamp_(min=_LEAST)
            own = shifted.gather(1, column[:, None])[:, 0] * mine
            weights = shifted.exp()
            sums = head.reduce(torch.stack([weights.sum(-1), weights.mul_(shifted).sum(-1), own]))
            log_sum = sums[0].log()
            logprobs.append(sums[2] - log_sum)
            entropies.append(log_sum - sums[1] / sums[0])
            normalizers.append(top + log_sum)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        head: _Head = ctx.head
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        parts = (t.split(head.rows) for t in (hidden, targets, normalizers, gradient, of_hidden))
        for part, wanted, normalizer, upstream, out in zip(*parts, strict=True):
            # d log p(target) / d logits = onehot - softmax
            of_logits = head.logits(part).sub_(normalizer[:, None]).exp_().mul_(-upstream[:, None])
            column, mine = head.place(wanted)
            of_logits.scatter_add_(1, column[:, None], (upstream * mine)[:, None])
            narrow = of_logits.div_(head.temperature).to(weight.dtype)
            del of_logits
            torch.mm(narrow, weight, out=out)
            add_products(of_weight, narrow, part)
        # apex's fused product of another micro-batch notes that no gradient is to be added (Megatron 0.16.1,
        # distributed_data_parallel.py, `_make_backward_post_hook`)
        head.weight.grad_added_to_main_grad = False
        return head.reduce(of_hidden), of_weight.to(weight.dtype), None, None


def add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total [columns, hidden] float32 += left [rows, columns] transposed times right [rows, hidden]."""
    for place, part in zip(total.split(_COLUMNS), left.split(_COLUMNS, dim=1), strict=True):
        if part.dtype is torch.float32:
            place.addmm_(part.t(), right)
        elif part.is_cuda:
            place.add_(torch.mm(part.t(), right, out_dtype=torch.float32))
        else:
            place.addmm_(part.t().float(), right.float())


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    product: Product,
    temperature: float,
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, hidden], weight [vocabulary / TP, hidden] of one dtype, targets [n] int64 -> log-probs with
    gradient and entropies in nats, float32 [n] each. Collective over the tensor-parallel ranks, backward
    too. `product` makes raw logits, see linear.py."""
    return _Logprobs.apply(hidden, weight, targets, _Head(weight, product, temperature, vocab))


class HeadSwitch:
    """Lets an output layer without a bias hand its input on in place of logits, for `chunked_logprobs`."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        self.hands_on = False
        whole = layer._forward_impl

        def forward(**words: Any) -> torch.Tensor:
            return words["input"] if self.hands_on else whole(**words)

        layer._forward_impl = forward
