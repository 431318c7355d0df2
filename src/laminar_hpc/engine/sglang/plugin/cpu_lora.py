"""Adapters on the CPU: SGLang's torch backend without pinned memory, which a machine without an accelerator
does not have, and with one product per adapter, where SGLang has one for each run of requests. Hooked in by
hooks.py."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.utils import generate_sequence_lengths
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
    """The tokens of a batch by adapter. `parts`: (place in the pool, first row, end, scaling); `order`: the
    token of each row, int64 [tokens], None where that is the batch's own order."""

    parts: list[tuple[int, int, int, float]]
    order: torch.Tensor | None
    has_active_lora: bool = False  # SGLang sets it


class CpuLoraBackend(BaseLoRABackend):
    """In place of TorchNativeLoRABackend. Tokens of one adapter are brought together once per product."""

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
        """Called before each forward pass; `weight_indices` are places of the pool, one per request."""
        lengths = generate_sequence_lengths(forward_batch, device="cpu").long()
        places = torch.tensor(weight_indices).repeat_interleave(lengths)
        grouped, order = places.sort(stable=True)
        parts, begin = [], 0
        kinds, counts = grouped.unique_consecutive(return_counts=True)
        for place, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            if lora_ranks[place]:
                parts.append((place, begin, begin + count, scalings[place]))
            begin += count
        self.batch_info = AdapterBatch(parts, None if torch.equal(grouped, places) else order)

    def run_lora_a_sgemm(self, x: torch.Tensor, weights: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """x: [tokens, inputs]; weights: [places, parts * rank, inputs]. Returns [rows, parts * rank], scaled,
        in the order of the batch's rows."""
        batch = self.batch_info
        rows = x if batch.order is None else x.index_select(0, batch.order)
        out = x.new_zeros(len(x), weights.shape[1])
        for place, begin, end, scaling in batch.parts:
            torch.mm(rows[begin:end], weights[place].T, out=out[begin:end]).mul_(scaling)
        return out

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """x: [rows, parts * rank]; weights: [places, outputs, rank], part i in rows `output_offset_cpu[i]` to
        the next. Adds to `base_output`, [tokens, outputs], and returns it."""
        batch, rank, offsets = self.batch_info, weights.shape[2], output_offset_cpu.tolist()
        for place, begin, end, _scaling in batch.parts:
            whole = weights[place]
            parts = [
                x[begin:end, i * rank : (i + 1) * rank] @ whole[first:last].T
                for i, (first, last) in enumerate(pairwise(offsets))
            ]
            change = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if batch.order is None:
                base_output[begin:end] += change
            else:
                base_output.index_add_(0, batch.order[begin:end], change)
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
