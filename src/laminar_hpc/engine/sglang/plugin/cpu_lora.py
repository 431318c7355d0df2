"""Adapters on the CPU: SGLang's torch backend without pinned memory, which a machine without an accelerator
does not have, and with one product for all adapters of a batch, where SGLang has one for each run of
requests. Hooked in by hooks.py."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.utils import generate_sequence_lengths
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode


class Unpinned(TorchFunctionMode):
    """Inside it no tensor's memory is pinned."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "pin_memory"})


def without_pinning(original: Callable, *arguments: Any, **rest: Any) -> Any:
    """Around LoRAManager.init_state, in which SGLang wraps the model's layers."""
    with Unpinned():
        return original(*arguments, **rest)


@dataclass
class AdapterBatch:
    """The tokens of a batch by adapter. `only`: the place of the one that has all of them. Else `places` of
    those that have any; `rows`, int64 [adapters, longest], are their tokens, padded; `tokens` are all of them
    behind each other, and `valid` where those lie in the flat `rows`, None where nothing is padded."""

    scalings: torch.Tensor  # [adapters, 1, 1]
    only: int | None = None
    places: torch.Tensor | slice | None = None
    rows: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    has_active_lora: bool = False  # SGLang sets it


class CpuLoraBackend(BaseLoRABackend):
    """In place of TorchNativeLoRABackend: one product for all adapters of a batch."""

    name = "torch_native"
    batch_info: AdapterBatch

    def __init__(self, max_loras_per_batch: int, device: torch.device, **_: Any) -> None:
        super().__init__(max_loras_per_batch, device)

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Called before each forward pass; `weight_indices` are places of the pool, one per request, of which
        those of the model alone have rank 0."""
        drafts = getattr(forward_batch, "spec_info", None)
        lengths = getattr(drafts, "lengths", None)  # of a pass that verifies drafts
        if lengths is None:
            lengths = generate_sequence_lengths(forward_batch, device="cpu").long()
        adapted = sorted({place for place in weight_indices if lora_ranks[place]})
        batch = AdapterBatch(torch.tensor([scalings[place] for place in adapted]).view(-1, 1, 1))
        self.batch_info = batch
        if adapted and len(set(weight_indices)) == 1:
            batch.only = adapted[0]
            return
        of_token = torch.tensor(weight_indices).repeat_interleave(lengths)
        rows = [(of_token == place).nonzero().flatten() for place in adapted]
        if not any(map(len, rows)):
            return
        adjacent = adapted[-1] - adapted[0] == len(adapted) - 1  # then the weights need no copy
        batch.places = slice(adapted[0], adapted[-1] + 1) if adjacent else torch.tensor(adapted)
        batch.rows, batch.tokens = pad_sequence(rows, batch_first=True), torch.cat(rows)
        longest = batch.rows.shape[1]
        if len(batch.tokens) < batch.rows.numel():
            batch.valid = torch.cat([torch.arange(len(row)) + i * longest for i, row in enumerate(rows)])

    def run_lora_a_sgemm(self, x: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """x: [tokens, inputs]; weights: [places, parts * rank, inputs]. Returns the scaled products, [tokens,
        parts * rank] of one adapter, else [adapters, longest, parts * rank]."""
        batch = self.batch_info
        if batch.only is not None:
            return (x @ weights[batch.only].T).mul_(batch.scalings[0, 0])
        if batch.rows is None:
            return x.new_empty(0)
        return torch.bmm(x[batch.rows], weights[batch.places].transpose(1, 2)).mul_(batch.scalings)

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """x: what `run_lora_a_sgemm` gave; weights: [places, outputs, rank], part i in rows
        `output_offset_cpu[i]` to the next. Adds to `base_output`, [tokens, outputs], and returns it."""
        batch, rank, spans = self.batch_info, weights.shape[2], list(pairwise(output_offset_cpu.tolist()))
        if batch.only is not None:
            whole = weights[batch.only]
            for i, (first, last) in enumerate(spans):
                base_output[:, first:last].addmm_(x[:, i * rank : (i + 1) * rank], whole[first:last].T)
        elif batch.rows is not None:
            chosen = weights[batch.places].transpose(1, 2)
            parts = [
                torch.bmm(x[..., i * rank : (i + 1) * rank], chosen[..., first:last])
                for i, (first, last) in enumerate(spans)
            ]
            change = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).flatten(0, 1)
            base_output.index_add_(0, batch.tokens, change if batch.valid is None else change[batch.valid])
        return base_output

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: torch.Tensor,
        qkv_lora_b: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Both halves of a fused projection."""
        low = self.run_lora_a_sgemm(x, qkv_lora_a)
        return self.run_lora_b_sgemm(low, qkv_lora_b, output_offset_cpu, base_output)

    def run_gate_up_lora(
        self, x: torch.Tensor, gate_up_lora_a: torch.Tensor, gate_up_lora_b: torch.Tensor, **rest: Any
    ) -> torch.Tensor:
        """The same of gate and up."""
        return self.run_qkv_lora(x, gate_up_lora_a, gate_up_lora_b, **rest)
