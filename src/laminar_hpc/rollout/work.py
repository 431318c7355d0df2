"""One trajectory on a replica: what is known of it on its way from a grant to its last token. Plain data and
pure functions, used by batch.py, migration.py and worker.py."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar_hpc.engine.interface import Generation
from laminar_hpc.messages.data import Partial, PromptGroup, Sample, Trajectory, VersionSpan
from laminar_hpc.messages.digest import sealed
from laminar_hpc.messages.moves import MoveOrder
from laminar_hpc.messages.rollouts import Grant


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
    finish_reason: str = ""
    request_id: str | None = None  # while the engine has it
    cached_tokens: int = 0  # of its first prefill here, taken from the prefix cache
    order: MoveOrder | None = None  # the move that takes it away
    dropped: bool = False  # the controller has given it to others
    of_request: Generation | None = None  # the increments of its present request
    sent: asyncio.Event = field(default_factory=asyncio.Event)  # the source's part of the order is done

    @property
    def room(self) -> int:
        """Response tokens that it may still get."""
        return self.max_response_tokens - len(self.partial.tokens)

    def streamed(self, weight_id: int, tokens: list[int], logprobs: list[float]) -> None:
        """An increment of its present request."""
        before = self.of_request or Generation([], [], "", [])
        tokens, logprobs = before.tokens + tokens, before.logprobs + logprobs
        self.of_request = Generation(tokens, logprobs, "", [VersionSpan(weight_id, 0, len(tokens))])

    def is_dropped(self) -> bool:
        return self.dropped

    @property
    def so_far(self) -> Partial:
        """With the increments of its present request."""
        return extended(self.partial, self.of_request) if self.of_request else self.partial


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
        )

    return [work(group, sample) for group in grant.groups for sample in group.samples]


def extended(partial: Partial, generation: Generation) -> Partial:
    """`partial` with the tokens of one more request; adjacent spans of the same weights become one."""
    offset, spans = len(partial.tokens), list(partial.spans)
    for span in generation.spans:
        if spans and spans[-1].weight_id == span.weight_id and spans[-1].end == offset + span.start:
            spans[-1] = VersionSpan(span.weight_id, spans[-1].start, offset + span.end)
        else:
            spans.append(VersionSpan(span.weight_id, offset + span.start, offset + span.end))
    tokens, logprobs = partial.tokens + generation.tokens, partial.logprobs + generation.logprobs
    return Partial(tokens, logprobs, spans, partial.time_started, partial.moves)


def first_not_finite(logprobs: Sequence[float]) -> int | None:
    """Place of the first log-prob that is NaN or infinite."""
    return next((i for i, value in enumerate(logprobs) if not math.isfinite(value)), None)


def objection(generation: Generation, weight_id: int | None) -> str | None:
    """Why this response must not be trained on; None when it may be. One trajectory, one policy, by the
    engine's own report (docs/architecture.md#one-policy); with `weight_id` None several are allowed.

    Log-probs that are not finite: the trainer never publishes weights that are not, so the engine's
    arithmetic overflowed. That may be chance, so the trajectory alone is lost and generated again; health.py
    says when it is no chance.
    """
    if generation.finish_reason not in ("stop", "length"):
        return f"the engine ended it with {generation.finish_reason}"
    if not generation.tokens:
        return "the engine returned no token"
    ids = [span.weight_id for span in generation.spans]
    if weight_id is not None and ids != [weight_id]:
        return f"generated with weight ids {ids} instead of {weight_id}"
    if (place := first_not_finite(generation.logprobs)) is not None:
        return f"the log-prob of response token {place} is not finite"
    return None


def trajectory(work: Work, replica: int) -> Trajectory:
    """The message for a finished one, as of now."""
    partial = work.partial
    generated = Trajectory(
        trajectory_id=work.trajectory_id,
        group_id=work.group.group_id,
        attempt=work.attempt,
        replica=replica,
        weight_id=work.weight_id,
        weight_step=work.weight_step,
        prompt_tokens=work.group.prompt_tokens,
        response_tokens=partial.tokens,
        logprobs=partial.logprobs,
        loss_mask=[1] * len(partial.tokens),
        finish_reason=work.finish_reason,
        version_spans=partial.spans,
        time_started=partial.time_started,
        time_finished=time.time(),
        moves=partial.moves,
    )
    return sealed(generated)
