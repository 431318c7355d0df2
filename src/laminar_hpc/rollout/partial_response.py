"""What a replica does with a response so far (`Partial`): pure functions on its columns."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from laminar_hpc.engine.interface import Generation
from laminar_hpc.line.messages.data import TOKEN_BYTES, Partial, VersionSpan
from laminar_hpc.store.payload.layout import DamagedResponse, Logprobs, Tokens, logprobs_array, tokens_array


def columns(tokens: ArrayLike, logprobs: ArrayLike) -> tuple[bytes, bytes]:
    """Both as messages carry them. Raises DamagedResponse for what are no token ids."""
    return tokens_array(tokens).tobytes(), logprobs_array(logprobs).tobytes()


def tokens_of(partial: Partial) -> Tokens:
    """A read-only view of its bytes."""
    return np.frombuffer(partial.tokens, "<i4")


def logprobs_of(partial: Partial) -> Logprobs:
    """A read-only view of its bytes; not all need be finite."""
    return np.frombuffer(partial.logprobs, "<f4")


def extended(partial: Partial, generation: Generation) -> Partial:
    """`partial` with the tokens of one more request. Raises DamagedResponse for what are no token ids, and
    for tokens whose weights the engine does not name: they would be taken for the environment's."""
    named, count = sum(span.end - span.start for span in generation.spans), len(generation.tokens)
    if named != count:
        raise DamagedResponse(f"the engine names the weights of {named} tokens, and gave {count}")
    return joined(partial, Partial(*columns(generation.tokens, generation.logprobs), generation.spans))


def joined(partial: Partial, more: Partial) -> Partial:
    """Both behind each other; adjacent spans of the same weights become one."""
    offset, spans = partial.count, list(partial.spans)
    for span in more.spans:
        if spans and spans[-1].weight_id == span.weight_id and spans[-1].end == offset + span.start:
            spans[-1] = VersionSpan(span.weight_id, spans[-1].start, offset + span.end)
        else:
            spans.append(VersionSpan(span.weight_id, offset + span.start, offset + span.end))
    return _changed(partial, partial.tokens + more.tokens, partial.logprobs + more.logprobs, spans)


def given(partial: Partial, tokens: Sequence[int]) -> Partial:
    """`partial` with tokens that the environment gives behind it."""
    more, zeros = columns(np.array(tokens, np.int32), np.zeros(len(tokens)))
    return _changed(partial, partial.tokens + more, partial.logprobs + zeros, partial.spans)


def cut(partial: Partial, count: int) -> Partial:
    """Cuts the response to its first `count` tokens."""
    spans = [VersionSpan(s.weight_id, s.start, min(s.end, count)) for s in partial.spans if s.start < count]
    end = TOKEN_BYTES * count
    return _changed(partial, partial.tokens[:end], partial.logprobs[:end], spans)


def _changed(partial: Partial, tokens: bytes, logprobs: bytes, spans: list[VersionSpan]) -> Partial:
    """With other tokens behind which no calls have been made yet."""
    changes = {"tokens": tokens, "logprobs": logprobs, "spans": spans, "called": False, "awaits": ""}
    return msgspec.structs.replace(partial, **changes, parked="")


def first_not_finite(partial: Partial) -> int | None:
    """The place of the first log-prob that is NaN or infinite."""
    wrong = np.flatnonzero(~np.isfinite(logprobs_of(partial)))
    return int(wrong[0]) if len(wrong) else None


def objection(partial: Partial, finish_reason: str, weight_id: int | None) -> str | None:
    """Why this response must not be trained on; None when it may be. One trajectory, one policy, by the
    engine's own report (docs/promises.md#one-policy); with `weight_id` None several are allowed.

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
