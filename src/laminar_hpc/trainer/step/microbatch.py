"""One micro-batch as tensors: several trajectories in one pack, and what is needed at the positions that are
trained."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.policies.metrics import accuracy
from laminar_hpc.store.payload.layout import Response, Routes, Tokens
from laminar_hpc.trainer.algorithms.loss_aggregation import likelihood_weights
from laminar_hpc.trainer.algorithms.tokens import Tokens as TrainedTokens
from laminar_hpc.trainer.megatron.packs import Pack, make_pack

T = TypeVar("T")


@dataclass(frozen=True)
class Text:
    """A prompt [tokens] int32 and its response. `routes`: the experts of all its tokens but the last, in this
    rank's layers; None: the router chooses."""

    prompt: Tokens
    response: Response
    routes: Routes | None = None


@dataclass(frozen=True)
class Example:
    """A text with what a step has computed of its trained tokens, float [trained] each: advantages, and
    log-probs by the proximal policy and the reference model where the algorithm asks for them. `outcome`: of
    the trajectory, as in TrainedTokens."""

    text: Text
    advantages: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    outcome: "TrajectoryOutcome | None" = None


class TrajectoryOutcome(NamedTuple):
    """What became of a trajectory: its reward as it came, its accuracy, 1 where it was cut at
    sampling.max_response_tokens, else 0, and its weight in the likelihood of right answers."""

    reward: float = 0.0
    right: float = 0.0
    truncated: float = 0.0
    likelihood: float = 0.0


def outcomes(
    records: Sequence[Trajectory], members: Sequence[Sequence[int]], a: AlgorithmConfig
) -> list[TrajectoryOutcome]:
    """Of all scored trajectories of a batch; `members`: those of each mini-batch."""
    found = [
        TrajectoryOutcome(t.reward, accuracy(t.reward, t.reward_parts), float(t.finish_reason == "length"))
        for t in records
    ]
    for part in members if a.likelihood_coefficient > 0 else ():
        right = torch.tensor([found[i].right for i in part], dtype=torch.float64)
        weights = likelihood_weights(
            right, torch.tensor([records[i].trained for i in part]), a.loss_aggregation
        )
        for i, weight in zip(part, weights.tolist(), strict=True):
            found[i] = found[i]._replace(likelihood=a.likelihood_coefficient * weight)
    return found


@dataclass(frozen=True)
class MicroBatch:
    """A pack and its trained tokens, in their order in the whole pack."""

    pack: Pack
    tokens: TrainedTokens


class Lazily(Sequence[T], Generic[T]):
    """`make(i)` for each i below `count`, made when it is asked for and kept by nobody: a rank holds the
    tensors of few micro-batches at a time."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[T]: ...
    def __getitem__(self, i: int | slice) -> T | Sequence[T]:
        if isinstance(i, slice):
            return [self._make(j) for j in range(*i.indices(self._count))]
        if not 0 <= i < self._count:
            raise IndexError(i)
        return self._make(i)


def branches(text: Text) -> list[tuple[Tokens, NDArray[np.int64]]]:
    """The sequences that the model saw, each with the indices of its trained tokens: prompt and response, or
    several where the response has branches. Their trained tokens, one sequence after the other, are the
    text's. Together they are at most as long as the text."""
    tokens, chosen = np.concatenate((text.prompt, text.response.tokens)), trained(text)
    return [(tokens[a:b], chosen[(a <= chosen) & (chosen < b)] - a) for a, b in _edges(text)]


def branch_routes(text: Text) -> list[Routes]:
    """Of the sequences of `branches`, each without its last token, which is no input."""
    assert text.routes is not None
    return [text.routes[a : b - 1] for a, b in _edges(text)]


def _edges(text: Text) -> Iterator[tuple[int, int]]:
    """Where each branch begins and ends in prompt and response."""
    first, end = len(text.prompt), len(text.prompt) + len(text.response.tokens)
    return pairwise([0, *(first + start for start in text.response.starts), end])


def trained(text: Text) -> NDArray[np.int64]:
    """Indices, in prompt and response, of the tokens that are trained: those of the response whose loss mask
    is 1."""
    return len(text.prompt) + np.flatnonzero(text.response.loss_mask)


def behaviour_logprobs(response: Response) -> torch.Tensor:
    """The engine's log-probs of the trained tokens, float32 [trained]."""
    return torch.from_numpy(response.logprobs[response.loss_mask])


class Drawn(Mapping[int, torch.Tensor]):
    """`behaviour_logprobs` of texts by their places, each made when it is asked for."""

    def __init__(self, texts: Mapping[int, Text]) -> None:
        self._texts = texts

    def __getitem__(self, place: int) -> torch.Tensor:
        return behaviour_logprobs(self._texts[place].response)

    def __iter__(self) -> Iterator[int]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def text_pack(texts: Sequence[Text], device: torch.device, size: int = 0) -> Pack:
    """Asks for the trained tokens of each; either all have routes or none has. No texts give a pack that asks
    for one token of no trajectory, so that every rank runs the same number of passes. Filled up to `size`
    tokens."""
    if not texts:
        return make_pack([[0, 0]], [[1]], device, size)
    sequences = [sequence for text in texts for sequence in branches(text)]
    tokens, drawn = [tokens for tokens, _ in sequences], [drawn for _, drawn in sequences]
    replayed = texts[0].routes is not None
    routes = [of_branch for text in texts for of_branch in branch_routes(text)] if replayed else None
    return make_pack(tokens, drawn, device, size, routes)


def make_microbatch(examples: Sequence[Example], device: torch.device, size: int = 0) -> MicroBatch:
    """Either all examples have a `proximal` or none has, and so for `reference`. No examples give an empty
    micro-batch, without a reference: a KL estimate that overflows is not finite at weight 0 either. Filled up
    to `size` tokens."""
    pack = text_pack([e.text for e in examples], device, size)
    if not examples:
        zero = torch.zeros(1, device=device)
        tokens = TrainedTokens(zero, zero, None, zero, zero.long(), 0, zero, zero, zero, zero)
        return MicroBatch(pack, tokens)

    def moved(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)).to(device, non_blocking=True)

    counts = [len(e.advantages) for e in examples]
    behaviour = moved([behaviour_logprobs(e.text.response) for e in examples])
    proximal = [e.proximal for e in examples if e.proximal is not None]
    reference = [e.reference for e in examples if e.reference is not None]
    known = [e.outcome or TrajectoryOutcome() for e in examples]
    of_outcomes = moved([torch.tensor(known).repeat_interleave(torch.tensor(counts), 0)])
    tokens = TrainedTokens(
        behaviour=behaviour,
        proximal=moved(proximal) if proximal else behaviour,
        reference=moved(reference) if reference else None,
        advantages=moved([e.advantages for e in examples]).float(),
        sequence=moved([torch.from_numpy(np.repeat(np.arange(len(examples)), counts))]),
        sequences=len(examples),
        real=torch.ones(len(behaviour), device=device),
        rewards=of_outcomes[:, 0],
        right=of_outcomes[:, 1],
        truncated=of_outcomes[:, 2],
        likelihood=of_outcomes[:, 3],
    )
    return MicroBatch(pack, tokens)
