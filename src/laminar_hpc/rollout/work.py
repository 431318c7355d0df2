"""One trajectory on a replica: what is known of it on its way from a grant to its last token. Plain data and
pure functions, used by batch.py, migration.py and worker.py."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from laminar_hpc.engine.interface import Generation
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.messages.data import TOKEN_BYTES, Partial, PromptGroup, Sample, Trajectory, VersionSpan
from laminar_hpc.messages.moves import MoveOrder
from laminar_hpc.messages.rollouts import Grant
from laminar_hpc.payload.layout import (
    DamagedResponse,
    Logprobs,
    Response,
    Tokens,
    drawn,
    logprobs_array,
    pack,
    packed_digest,
    tokens_array,
)
from laminar_hpc.turns.episode import Episode
from laminar_hpc.turns.history import History
from laminar_hpc.turns.session import Session


@dataclass(frozen=True)
class Outcome:
    """How a trajectory ended on this replica: it is with another one, is lost for a reason, or else is
    whole."""

    moved_away: bool = False
    lost: str | None = None


@dataclass
class Work:
    """A trajectory that this replica owns. `weight_id` and `weight_step` are those that it began with."""

    trajectory_id: int
    attempt: int
    group: PromptGroup
    weight_id: int
    weight_step: int
    temperature: float
    max_response_tokens: int
    evaluation: str = ""
    partial: Partial = field(default_factory=Partial)
    starts: list[int] = field(default_factory=list)  # of its later branches, among the response's tokens
    finish_reason: str = ""
    request_id: str | None = None  # while the engine has it
    cached_tokens: int = 0  # of its first prefill here, taken from the prefix cache
    order: MoveOrder | None = None  # the move that takes it away
    dropped: bool = False  # the controller has given it to others
    waited: float = 0.0  # seconds for a place among the requests, of its present turn
    told: int = 0  # response tokens that the controller's pool knows
    episode: Episode | None = None  # where it has several turns
    session: Session | None = None  # its environment
    history: History | None = None  # its turns, where they may begin a branch
    waits: bool = False  # for a tool, without a request: it may move
    left: bool = False  # its local batch has failed: it goes on elsewhere, if it can
    ordered: asyncio.Event = field(default_factory=asyncio.Event)  # while it waits: to move, or to end
    failures: int = 0  # of its environments, at other replicas
    ungraded: int = 0  # it is lost because its environment failed so many times
    score: Score | None = None  # its agent's
    patient: bool = False  # its environment has all of environment.timeout_seconds for each call
    bound: bool = False  # to its environment here: it goes on here, or begins again
    of_request: Partial | None = None  # the increments of its present request
    sent: asyncio.Event = field(default_factory=asyncio.Event)  # the source's part of the order is done

    def __post_init__(self) -> None:
        self.told = self.partial.count

    @property
    def room(self) -> int:
        """Response tokens that it may still get."""
        return self.max_response_tokens - self.partial.count

    def sampling_seed(self, seed: int) -> int:
        """Of its present branch in the run of `seed`: the engine adds the place of each token. The same at
        every replica and in every attempt, so that what goes on elsewhere is drawn as it would have been."""
        name = f"{seed} {self.trajectory_id} {len(self.starts)}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1

    def streamed(self, weight_id: int, tokens: bytes, logprobs: bytes) -> None:
        """An increment of its present request, as columns."""
        before = self.of_request or Partial()
        tokens, logprobs = before.tokens + tokens, before.logprobs + logprobs
        so_far = Partial(tokens, logprobs)
        so_far.spans = [VersionSpan(weight_id, 0, so_far.count)]
        self.of_request = so_far

    def is_dropped(self) -> bool:
        return self.dropped

    def give(self, tokens: Sequence[int]) -> None:
        """Tokens that the environment gives."""
        before, more = self.partial, tokens_array(np.array(tokens, np.int32))
        zeros = logprobs_array(np.zeros(len(more)))
        joined = before.tokens + more.tobytes(), before.logprobs + zeros.tobytes()
        self.partial = Partial(*joined, before.spans, before.time_started, before.moves, home=before.home)

    def cut(self, count: int) -> None:
        """Its response ends after so many tokens, if it has more: its turn was stopped there."""
        part = self.partial
        if count < part.count:
            spans = [s for s in part.spans if s.start < count]
            spans[-1] = VersionSpan(spans[-1].weight_id, spans[-1].start, min(spans[-1].end, count))
            kept = part.tokens[: TOKEN_BYTES * count], part.logprobs[: TOKEN_BYTES * count]
            self.partial = Partial(*kept, spans, part.time_started, part.moves, home=part.home)
            self.finish_reason = "stop"

    def branch(self) -> None:
        """What is given next begins a sequence of its own."""
        self.starts.append(self.partial.count)

    @property
    def sequence(self) -> Tokens:
        """What the model sees: prompt and response, or the present branch."""
        tokens = tokens_of(self.partial)
        if self.starts:
            return tokens[self.starts[-1] :]
        return np.concatenate((np.array(self.group.prompt_tokens, np.int32), tokens))

    def begin_again(self) -> None:
        """From its prompt."""
        self.partial, self.starts, self.told = Partial(moves=self.partial.moves), [], 0

    @property
    def so_far(self) -> Partial:
        """What somebody else can go on with: with the increments of its present request."""
        if self.bound:
            return Partial()
        return _joined(self.partial, self.of_request) if self.of_request else self.partial


def works(grant: Grant) -> list[Work]:
    """The trajectories of a grant, group by group."""

    def work(group: PromptGroup, sample: Sample) -> Work:
        return Work(
            sample.trajectory_id,
            sample.attempt,
            group,
            grant.weight_id,
            grant.weight_step,
            grant.temperature,
            grant.max_response_tokens,
            grant.evaluation,
            grant.parts.get(sample.trajectory_id) or Partial(),
            failures=sample.ungraded,
        )

    return [work(group, sample) for group in grant.groups for sample in group.samples]


def columns(tokens: ArrayLike, logprobs: ArrayLike) -> tuple[bytes, bytes]:
    """As messages carry them. Raises Damaged for what are no token ids."""
    return tokens_array(tokens).tobytes(), logprobs_array(logprobs).tobytes()


def tokens_of(partial: Partial) -> Tokens:
    """A read-only view of its bytes."""
    return np.frombuffer(partial.tokens, "<i4")


def logprobs_of(partial: Partial) -> Logprobs:
    """A read-only view of its bytes; not all need be finite."""
    return np.frombuffer(partial.logprobs, "<f4")


def extended(partial: Partial, generation: Generation) -> Partial:
    """`partial` with the tokens of one more request. Raises Damaged for what are no token ids, and for tokens
    of which the engine does not say who drew them: they would pass for the environment's."""
    named, count = sum(span.end - span.start for span in generation.spans), len(generation.tokens)
    if named != count:
        raise DamagedResponse(f"the engine names the weights of {named} tokens, and gave {count}")
    return _joined(partial, Partial(*columns(generation.tokens, generation.logprobs), generation.spans))


def _joined(partial: Partial, more: Partial) -> Partial:
    """Adjacent spans of the same weights become one."""
    offset, spans = partial.count, list(partial.spans)
    for span in more.spans:
        if spans and spans[-1].weight_id == span.weight_id and spans[-1].end == offset + span.start:
            spans[-1] = VersionSpan(span.weight_id, spans[-1].start, offset + span.end)
        else:
            spans.append(VersionSpan(span.weight_id, offset + span.start, offset + span.end))
    tokens, logprobs = partial.tokens + more.tokens, partial.logprobs + more.logprobs
    return Partial(tokens, logprobs, spans, partial.time_started, partial.moves, home=partial.home)


def first_not_finite(partial: Partial) -> int | None:
    """Place of the first log-prob that is NaN or infinite."""
    wrong = np.flatnonzero(~np.isfinite(logprobs_of(partial)))
    return int(wrong[0]) if len(wrong) else None


def objection(partial: Partial, finish_reason: str, weight_id: int | None) -> str | None:
    """Why this response must not be trained on; None when it may be. One trajectory, one policy, by the
    engine's own report (docs/architecture.md#one-policy); with `weight_id` None several are allowed.

    Log-probs that are not finite: the trainer never publishes weights that are not, so the engine's
    arithmetic overflowed. That may be chance, so the trajectory alone is lost and generated again; health.py
    says when it is no chance.
    """
    if finish_reason not in ("stop", "length"):
        return f"the engine ended it with {finish_reason}"
    if not partial.count:
        return "the engine returned no token"
    ids = sorted(partial.weight_ids)
    if weight_id is not None and ids != [weight_id]:
        return f"generated with weight ids {ids} instead of {weight_id}"
    if (place := first_not_finite(partial)) is not None:
        return f"the log-prob of response token {place} is not finite"
    return None


def packed(work: Work) -> bytes:
    """The whole response of a finished one, as it goes into a payload file."""
    partial = work.partial
    runs = drawn(partial.count, partial.spans, work.starts)
    whole = tokens_of(partial), logprobs_of(partial), partial.spans, runs
    return pack(Response(work.trajectory_id, work.attempt, *whole))


def trajectory(work: Work, replica: int, response: bytes) -> Trajectory:
    """What is said of a finished one, as of now; `response`: packed."""
    partial = work.partial
    return Trajectory(
        turns=work.episode.turns if work.episode else 1,
        trajectory_id=work.trajectory_id,
        group_id=work.group.group_id,
        attempt=work.attempt,
        replica=replica,
        weight_id=work.weight_id,
        weight_step=work.weight_step,
        length=partial.count,
        trained=partial.trained,
        policies=len(partial.weight_ids),
        finish_reason=work.finish_reason,
        time_started=partial.time_started,
        time_finished=time.time(),
        moves=partial.moves,
        digest=packed_digest(response),
    )
