"""Sequences of tokens as one pack, which is what the model is run on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laminar_hpc.trainer.megatron.attention import PackLayout, pack_layout


@dataclass(frozen=True)
class Pack:
    """Sequences one after the other. A sequence's last token predicts nothing, so it is no input.

    `tokens`, `positions` [tokens] int64; `selected` [trained] int64: the pack's places whose next token is
    asked for; `targets` [trained]: it.
    """

    layout: PackLayout
    tokens: torch.Tensor
    positions: torch.Tensor
    selected: torch.Tensor
    targets: torch.Tensor


def make_pack(
    sequences: Sequence[Sequence[int]], selected: Sequence[Sequence[int]], device: torch.device, size: int = 0
) -> Pack:
    """`selected[i]`: the indices of those tokens of sequence i (each at least 1) whose log-probs are asked
    for.

    Filled up to `size` tokens with sequences of zeros, none longer than the others are, so that attention to
    them costs no more.
    """
    lengths = [len(s) - 1 for s in sequences]
    missing, longest = size - sum(lengths), max(lengths)
    lengths += [min(longest, missing - at) for at in range(0, missing, longest)]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)

    return Pack(
        layout=pack_layout(lengths, device),
        tokens=ints([t for s in sequences for t in s[:-1]] + [0] * missing),
        positions=ints([p for n in lengths for p in range(n)]),
        selected=ints(
            [start + i - 1 for start, chosen in zip(starts, selected, strict=False) for i in chosen]
        ),
        targets=ints([s[i] for s, chosen in zip(sequences, selected, strict=True) for i in chosen]),
    )
