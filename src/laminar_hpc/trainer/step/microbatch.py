"""One micro-batch as tensors: several trajectories in one pack, and what is needed at the positions that are
trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laminar_hpc.messages.data import Trajectory
from laminar_hpc.trainer.algorithms.tokens import Tokens
from laminar_hpc.trainer.megatron.packs import Pack, make_pack


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
