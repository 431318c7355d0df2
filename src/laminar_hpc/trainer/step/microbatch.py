"""One micro-batch as tensors: several trajectories in one pack, and what is needed at the positions that are
trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laminar_hpc.messages import Trajectory
from laminar_hpc.trainer.algorithms.tokens import Tokens
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


@dataclass(frozen=True)
class Example:
    """A trajectory with what a step has computed of its trained tokens, float32 [trained] each: advantages,
    and log-probs by the proximal policy and the reference model where the algorithm asks for them."""

    trajectory: Trajectory
    advantages: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """A pack and its trained tokens, in the order of `pack.selected`."""

    pack: Pack
    tokens: Tokens


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


def length(trajectory: Trajectory) -> int:
    """Tokens that a trajectory takes up in a pack."""
    return len(trajectory.prompt_tokens) + len(trajectory.response_tokens) - 1


def trained(trajectory: Trajectory) -> list[int]:
    """Indices, in prompt and response, of the tokens that are trained: those of the response whose loss_mask
    is 1."""
    return [len(trajectory.prompt_tokens) + j for j, m in enumerate(trajectory.loss_mask) if m]


def behaviour_logprobs(trajectory: Trajectory) -> torch.Tensor:
    """The engine's log-probs of the trained tokens, float32 [trained]."""
    return torch.tensor(
        [lp for lp, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if m],
        dtype=torch.float32,
    )


def trajectory_pack(trajectories: Sequence[Trajectory], device: torch.device, size: int = 0) -> Pack:
    """Asks for the trained tokens of each. No trajectories give a pack that asks for one token of no
    trajectory, so that every rank runs the same number of passes. Filled up to `size` tokens."""
    if not trajectories:
        return make_pack([[0, 0]], [[1]], device, size)
    return make_pack(
        [t.prompt_tokens + t.response_tokens for t in trajectories],
        [trained(t) for t in trajectories],
        device,
        size,
    )


def make_microbatch(examples: Sequence[Example], device: torch.device, size: int = 0) -> MicroBatch:
    """Either all examples have a `proximal` or none has, and so for `reference`. No examples give an empty
    micro-batch. Filled up to `size` tokens."""
    pack = trajectory_pack([e.trajectory for e in examples], device, size)
    if not examples:
        zero = torch.zeros(1, device=device)
        return MicroBatch(pack, Tokens(zero, zero, zero, zero, zero.long(), 0, zero))

    def moved(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)).to(device, non_blocking=True)

    behaviour = moved([behaviour_logprobs(e.trajectory) for e in examples])
    proximal = [e.proximal for e in examples if e.proximal is not None]
    reference = [e.reference for e in examples if e.reference is not None]
    tokens = Tokens(
        behaviour=behaviour,
        proximal=moved(proximal) if proximal else behaviour,
        reference=moved(reference) if reference else None,
        advantages=moved([e.advantages for e in examples]),
        sequence=moved([torch.full((len(e.advantages),), i) for i, e in enumerate(examples)]),
        sequences=len(examples),
        real=torch.ones(len(behaviour), device=device),
    )
    return MicroBatch(pack, tokens)
