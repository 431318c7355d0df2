"""What SGLang's replies say, in the terms of engine/interface.py. Only what is used is decoded, and responses
come as columns (plugin/columns.py): no object is made for a token."""

import math

import msgspec
import numpy as np

from laminar_hpc.engine.interface import UNKNOWN_WEIGHTS, Generation, RequestFailed
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.store.payload.layout import Logprobs, Tokens


class FinishReason(msgspec.Struct):
    type: str


class Version(msgspec.Struct):
    """Tokens [start, end) are of the weights that SGLang knows by this name."""

    version: str | int
    start: int
    end: int


class Meta(msgspec.Struct):
    """The columns are base64 in JSON; absent where plugin/columns.py did not write the reply."""

    finish_reason: FinishReason | None = None
    laminar_tokens: bytes | None = None
    laminar_logprobs: bytes | None = None
    weight_version: str | int | None = None
    weight_versions: list[Version] | None = None
    cached_tokens: int | None = None
    routed_experts: bytes | None = None


class GenerateReply(msgspec.Struct):
    """What /generate answers, or one event of its stream."""

    meta_info: Meta


_decoder = msgspec.json.Decoder(GenerateReply)


def decode(body: bytes) -> GenerateReply:
    """Raises RequestFailed for what is no response, which may be an error's text."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        text = body[:300].decode(errors="replace")
        raise RequestFailed(f"the engine's reply is no response ({error}): {text}") from None


def logprob(value: float | None) -> float:
    """JSON has no NaN and no infinities: SGLang writes null. They are NaN here; the caller decides."""
    return math.nan if value is None else value


def weight_id(weight_version: object) -> int:
    """UNKNOWN_WEIGHTS for the name of a version that is no weight id."""
    return int(str(weight_version)) if str(weight_version).isdigit() else UNKNOWN_WEIGHTS


def columns(meta: Meta) -> tuple[Tokens, Logprobs]:
    """(tokens int32, log-probs float32) of a reply. Raises RequestFailed when they do not belong together."""
    if meta.laminar_tokens is None or meta.laminar_logprobs is None:
        raise RequestFailed("the engine's reply has no columns; install this package in SGLang's environment")
    if len(meta.laminar_tokens) != len(meta.laminar_logprobs):
        raise RequestFailed(
            f"the engine returned {len(meta.laminar_tokens) // 4} tokens with log-probs of other tokens"
        )
    return np.frombuffer(meta.laminar_tokens, "<i4"), np.frombuffer(meta.laminar_logprobs, "<f4")


def parse_generation(replies: list[GenerateReply]) -> Generation:
    """The response that comes in these parts, the last of which has its end. Raises RequestFailed."""
    last = replies[-1].meta_info
    parts = [columns(reply.meta_info) for reply in replies]
    tokens, logprobs = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
    if last.finish_reason is None:
        raise RequestFailed(f"the engine broke off its answer after {len(tokens)} tokens")
    return Generation(
        tokens,
        logprobs,
        last.finish_reason.type,
        [VersionSpan(weight_id(span.version), span.start, span.end) for span in last.weight_versions or ()]
        or [VersionSpan(weight_id(last.weight_version), 0, len(tokens))],
        last.cached_tokens or 0,
        last.routed_experts,
    )
