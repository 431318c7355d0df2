"""One micro-batch as tensors: several trajectories in one pack, and what is needed at the positions that are trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laminar_hpc.messages import Trajectory
from laminar_hpc.trainer.attention import PackLayout, pack_layout


@dataclass(frozen=True)
class Pack:
    """Sequences one after the other. A sequence's last token predicts nothing, so it is no input.

    `tokens`, `positions` [tokens] int64; `selected` [trained] int64: the pack's places whose next token is asked for; `targets`
    [trained]: it.
    """

    layout: PackLayout
    tokens: torch.Tensor
    positions: torch.Tensor
    selected: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """A pack and, per trained token, float32 [trained]: the behaviour log-prob, the advantage, the weight (0 only in an empty
    micro-batch)."""

    pack: Pack
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


def make_pack(sequences: Sequence[Sequence[int]], selected: Sequence[Sequence[int]], device: torch.device, size: int = 0) -> Pack:
    """`selected[i]`: the indices of those tokens of sequence i (each at least 1) whose log-probs are asked for.

    Filled up to `size` tokens with sequences of zeros, none longer than the others are, so that attention to them costs no more.
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
        selected=ints([start + i - 1 for start, chosen in zip(starts, selected, strict=False) for i in chosen]),
        targets=ints([s[i] for s, chosen in zip(sequences, selected, strict=True) for i in chosen]),
    )


def length(trajectory: Trajectory) -> int:
    """Tokens that a trajectory takes up in a pack."""
    return len(trajectory.prompt_tokens) + len(trajectory.response_tokens) - 1


def make_microbatch(trajectories: Sequence[Trajectory], advantages: Sequence[float], device: torch.device, size: int = 0) -> MicroBatch:
    """Trains the response tokens whose loss_mask is 1. No trajectories give an empty micro-batch: one token of weight 0, so that every rank
    runs the same number of forward and backward passes. Filled up to `size` tokens."""
    if not trajectories:
        zero = torch.zeros(1, device=device)
        return MicroBatch(make_pack([[0, 0]], [[1]], device, size), zero, zero, zero)
    chosen = [[len(t.prompt_tokens) + j for j, m in enumerate(t.loss_mask) if m] for t in trajectories]
    pack = make_pack([t.prompt_tokens + t.response_tokens for t in trajectories], chosen, device, size)
    behaviour = [lp for t in trajectories for lp, m in zip(t.logprobs, t.loss_mask, strict=True) if m]
    per_token = [a for a, c in zip(advantages, chosen, strict=True) for _ in c]
    return MicroBatch(
        pack,
        torch.tensor(behaviour, dtype=torch.float32).to(device, non_blocking=True),
        torch.tensor(per_token, dtype=torch.float32).to(device, non_blocking=True),
        torch.ones(len(behaviour), device=device),
    )
