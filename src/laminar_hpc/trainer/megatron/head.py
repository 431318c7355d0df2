"""The output layer's log-probs and entropy, whose vocabulary is padded and split over tensor-parallel ranks.
Called by trainer/megatron/policy.py.

They come from all logits (`whole_logprobs`), or, where config/models.py `head_in_chunks` says that it takes
less memory, chunk by chunk of rows from the last hidden states (`chunked_logprobs`): 32K tokens over a
vocabulary of 152K are 20 GB of logits. Then at most LOGITS_BYTES of them are there at once; the price is one
product of the head more, in the backward pass.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear

from laminar_hpc.config.models import LOGITS_BYTES
from laminar_hpc.trainer.megatron.distillation import Comparison, TeacherRows
from laminar_hpc.trainer.megatron.linear import Product
from laminar_hpc.weights.kernels import logprobs as kernels

_COMPARED = 4  # so many tensors of a chunk's logits are there at once beside a teacher's
_COLUMNS = 8192  # of the vocabulary: whose weight gradient is computed at a time on the CPU


class VocabularyShard:
    """This tensor-parallel rank's columns of the vocabulary, and the temperature."""

    def __init__(self, columns: int, temperature: float, vocab: int, at_once: int = 1) -> None:
        self.columns = columns
        self.temperature = temperature
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.first = parallel_state.get_tensor_model_parallel_rank() * columns
        self.real = min(columns, max(0, vocab - self.first))
        self.rows = max(1, LOGITS_BYTES // (4 * columns * at_once))

    def places(self, targets: torch.Tensor) -> torch.Tensor:
        """Of each target its column here, negative where another rank has it."""
        column = targets - self.first
        return column.where((column >= 0) & (column < self.real), -1)

    def reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group.size() > 1:
            dist.all_reduce(x, op, group=self.group)
        return x

    def values(
        self, chunks: Iterable[torch.Tensor], places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropies and normalizers of all rows, from the logits of `rows` of them at a time."""
        parts = zip(chunks, places.split(self.rows), strict=True)
        found = [kernels.summary(logits, wanted, self.real, self.temperature) for logits, wanted in parts]
        greatest, total, weighted, wanted = torch.cat(found, 1)
        top = self.reduce(greatest.clone(), dist.ReduceOp.MAX)
        lower = greatest - top
        scale, wanted = lower.exp(), (wanted - top) * (places >= 0)
        sums = self.reduce(torch.stack([total * scale, (weighted + total * lower) * scale, wanted]))
        log_sum = sums[0].log()
        return sums[2] - log_sum, log_sum - sums[1] / sums[0], top + log_sum

    def gradient(
        self,
        logits: torch.Tensor,
        places: torch.Tensor,
        normalizers: torch.Tensor,
        upstream: torch.Tensor,
        entropy: kernels.EntropySlope | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """d log p(target) / d logits = onehot - softmax, times `upstream`, and the entropies' gradient, in
        `out`."""
        kernels.gradient(logits, places, self.real, self.temperature, normalizers, upstream, entropy, out)
        return out


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, head: VocabularyShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = head.places(targets)
        logprobs, entropies, normalizers = head.values(logits.split(head.rows), places)
        ctx.head = head
        ctx.save_for_backward(logits, places, normalizers, entropies)
        ctx.set_materialize_grads(False)  # so that a step without an entropy bonus pays nothing for it
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_entropies: torch.Tensor | None) -> tuple:
        logits, places, normalizers, entropies = ctx.saved_tensors
        gradient = torch.zeros_like(normalizers) if gradient is None else gradient
        slope = None if of_entropies is None else kernels.EntropySlope(entropies, of_entropies)
        return ctx.head.gradient(logits, places, normalizers, gradient, slope, logits), None, None


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        head: VocabularyShard,
        product: Product,
        teacher: TeacherRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        places = head.places(targets)
        logits: Iterable[torch.Tensor]
        logits = (product(part, weight, None).float() for part in hidden.split(head.rows))
        compared = None if teacher is None else Comparison(head, teacher, product)
        if compared is not None:
            logits = compared.watched(logits)
        logprobs, entropies, normalizers = head.values(logits, places)
        ctx.head = head
        ctx.compared = compared
        ctx.product = product
        ctx.weight = weight
        ctx.save_for_backward(hidden, weight, places, normalizers, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies, None if compared is None else torch.cat(compared.found)

    @staticmethod
    def backward(
        ctx: Any,
        gradient: torch.Tensor | None,
        of_entropies: torch.Tensor | None,
        of_divergences: torch.Tensor | None,
    ) -> tuple:
        hidden, weight, places, normalizers, entropies = ctx.saved_tensors
        head: VocabularyShard = ctx.head
        gradient = torch.zeros_like(normalizers) if gradient is None else gradient
        slopes = (
            [None] * len(normalizers.split(head.rows))
            if of_entropies is None
            else [
                kernels.EntropySlope(*each)
                for each in zip(entropies.split(head.rows), of_entropies.split(head.rows), strict=True)
            ]
        )
        of_hidden, of_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        parts = (t.split(head.rows) for t in (hidden, places, normalizers, gradient, of_hidden))
        of_teacher = None if of_divergences is None else of_divergences.split(head.rows)
        for number, (part, wanted, normalizer, upstream, out, slope) in enumerate(
            zip(*parts, slopes, strict=True)
        ):
            logits = ctx.product(part, weight, None).float()
            more = ctx.compared.gradient(logits, number, of_teacher[number]) if of_teacher else None
            narrow = logits if weight.dtype is torch.float32 else torch.empty_like(logits, dtype=weight.dtype)
            head.gradient(logits, wanted, normalizer, upstream, slope, narrow)
            if more is not None:
                narrow[:, : head.real].add_(more)
            del logits, more
            torch.mm(narrow, weight, out=out)
            if of_weight is not None:
                add_products(of_weight, narrow, part)
        # apex's fused product of another micro-batch notes that no gradient is to be added (Megatron 0.16.1,
        # distributed_data_parallel.py, `_make_backward_post_hook`)
        ctx.weight.grad_added_to_main_grad = False
        found = None if of_weight is None else of_weight.to(weight.dtype)
        return head.reduce(of_hidden), found, None, None, None, None


def add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total [columns, hidden] float32 += left [rows, columns] transposed times right [rows, hidden]."""
    if left.dtype is torch.float32:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:  # there is no such product for the CPU
        for place, part in zip(total.split(_COLUMNS), left.split(_COLUMNS, dim=1), strict=True):
            place.addmm_(part.t().float(), right.float())


def whole_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, vocabulary / TP] float32 at temperature 1, targets [n] int64 -> log-probs and entropies in
    nats, float32 [n] each, both with gradient. Collective over the tensor-parallel ranks; the backward pass
    overwrites `logits`."""
    return _Whole.apply(logits, targets, VocabularyShard(logits.shape[1], temperature, vocab))


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    product: Product,
    temperature: float,
    vocab: int,
    teacher: TeacherRows | None = None,
) -> tuple[torch.Tensor, ...]:
    """As `whole_logprobs`, from hidden [n, hidden] and weight [vocabulary / TP, hidden] of one dtype, whose
    logits `product` makes, see linear.py; the backward pass is collective too. With a teacher also the
    divergences from it, float32 [n] with gradient, for a product of its head in each pass."""
    head = VocabularyShard(len(weight), temperature, vocab, 1 if teacher is None else _COMPARED)
    found = _Chunked.apply(hidden, weight, targets, head, product, teacher)
    return found if teacher is not None else found[:2]


class HeadSwitch:
    """Lets an output layer without a bias hand its input on in place of logits, for `chunked_logprobs`."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        self.hands_on = False
        whole = layer._forward_impl

        def forward(**words: Any) -> torch.Tensor:
            return words["input"] if self.hands_on else whole(**words)

        layer._forward_impl = forward
