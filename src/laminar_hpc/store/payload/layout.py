"""A response as columns, and as bytes: what a rollout writes when it has the last token, and what trainers,
scorers, audit and archive read.

    header, 48 bytes   magic "LJP1", attempt u32, trajectory id i64, counts of tokens, spans and mask runs
                       u32, 4 bytes of zero, digest
    spans              weight id i64, start u32, end u32 each
    tokens             i32 each
    log-probs          f32 each: the engine's behaviour log-probs of these tokens
    mask runs          u32 each: lengths of runs of the loss mask, trained and not trained in turn, the first
                       trained (0 if the response begins with tokens that are not). Each later trained run
                       of length 0 begins a branch: the tokens behind it are a sequence of their own, which
                       repeats what it needs of prompt and earlier turns

Little-endian, and a multiple of four bytes long. The digest is half a SHA-256 over all the rest. So a
response takes 8 bytes per token and less than 100 more, if it is of one policy and all of it is trained.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from laminar_hpc.line.messages.data import VersionSpan

_MAGIC = b"LJP1"
_COUNTS = struct.Struct("<4sIqIII4x")
DIGEST_BYTES = 16
HEADER_BYTES = _COUNTS.size + DIGEST_BYTES
_SPAN = struct.Struct("<qII")
_TOKEN, _LOGPROB, _RUN = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<u4")

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Runs = NDArray[np.uint32]
Routes = NDArray[np.uint8] | NDArray[np.int16]


class DamagedResponse(ValueError):
    """These bytes are no response, or not the one that was generated."""


@dataclass(frozen=True)
class Response:
    """The columns of one response. `tokens` [n] int32 and `logprobs` [n] float32; `mask_runs` [runs] uint32,
    whose sum is n. `digest`: in hexadecimal, of the bytes that it was read from; "" before it was packed.
    `routed_experts` [tokens of prompt and response - 1, layers with a router, experts per token] uint8 or
    int16: row i has the experts that the engine sent token i to; None unless the reader asked for them."""

    trajectory_id: int
    attempt: int
    tokens: Tokens
    logprobs: Logprobs
    spans: Sequence[VersionSpan]
    mask_runs: Runs
    digest: str = field(default="", compare=False)
    routed_experts: Routes | None = field(default=None, compare=False)

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[n]: which tokens are trained."""
        return np.repeat(np.arange(len(self.mask_runs)) % 2 == 0, self.mask_runs)

    @property
    def trained(self) -> int:
        """How many tokens are trained."""
        return int(self.mask_runs[::2].sum())

    @property
    def starts(self) -> list[int]:
        """Where the later branches begin; empty for a response of one branch."""
        ends = np.cumsum(self.mask_runs)
        return [int(ends[i]) for i in range(2, len(ends), 2) if self.mask_runs[i] == 0]


def tokens_array(tokens: ArrayLike) -> Tokens:
    """Raises DamagedResponse for token ids that are no int32."""
    array = np.asarray(tokens)
    if array.dtype == _TOKEN:
        return array
    if array.size and not (
        np.issubdtype(array.dtype, np.integer) and -(2**31) <= array.min() <= array.max() < 2**31
    ):
        raise DamagedResponse("token ids are not 32-bit integers")
    return array.astype(_TOKEN)


def logprobs_array(logprobs: ArrayLike) -> Logprobs:
    """Log-probs as float32, which is what engines compute."""
    return np.asarray(logprobs, _LOGPROB)


def last_drawn(tokens: Tokens, mask_runs: Runs) -> Tokens:
    """The last of the parts that the policy has drawn in one go, a view; of one turn, all of it."""
    last = (len(mask_runs) - 1) // 2 * 2
    start = int(mask_runs[:last].sum())
    return tokens[start : start + int(mask_runs[last])]


def drawn(count: int, spans: Sequence[VersionSpan], starts: Sequence[int] = ()) -> Runs:
    """The mask runs of a response of which the policy has drawn what `spans` cover, in order; the rest the
    environment gave. `starts`: of later branches, which begin with what was given, each before a span."""
    runs, at, left = [0], 0, list(starts)
    for span in spans:
        while left and left[0] <= span.start:
            runs += [left[0] - at, 0]
            at = left.pop(0)
        if span.start > at:
            runs += [span.start - at, 0]
        runs[-1] += span.end - span.start
        at = span.end
    return np.array([*runs, count - at] if count > at else runs, _RUN)


def pack(response: Response) -> bytes:
    """The response as bytes, with its digest. Raises DamagedResponse when columns differ in length."""
    count = len(response.tokens)
    if len(response.logprobs) != count or int(response.mask_runs.sum()) != count:
        raise DamagedResponse(
            f"{count} tokens, {len(response.logprobs)} log-probs, {response.mask_runs.sum()} in the mask"
        )
    sizes = (count, len(response.spans), len(response.mask_runs))
    head = _COUNTS.pack(_MAGIC, response.attempt, response.trajectory_id, *sizes)
    body = b"".join(
        (
            *(_SPAN.pack(span.weight_id, span.start, span.end) for span in response.spans),
            np.ascontiguousarray(response.tokens, _TOKEN).data,
            np.ascontiguousarray(response.logprobs, _LOGPROB).data,
            np.ascontiguousarray(response.mask_runs, _RUN).data,
        )
    )
    return b"".join((head, digest_of(head, body), body))


def packed_digest(packed: bytes) -> str:
    """The digest inside of what `pack` has made, in hexadecimal."""
    return packed[_COUNTS.size : HEADER_BYTES].hex()


def unpack(
    buffer: bytes | bytearray | memoryview | NDArray[np.uint8], check: bool = True, due: int | None = None
) -> Response:
    """The response that fills `buffer`; its columns are views of it. Raises DamagedResponse for bytes that
    are none, with `check` for those that have not their digest, and for another trajectory than is `due`."""
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if len(view) < HEADER_BYTES:
        raise DamagedResponse(f"{len(view)} bytes hold no response")
    magic, attempt, trajectory_id, count, spans, runs = _COUNTS.unpack_from(view)
    tokens_at = HEADER_BYTES + spans * _SPAN.size
    if magic != _MAGIC or len(view) != tokens_at + 8 * count + 4 * runs:
        raise DamagedResponse("it is no response, or is cut off")
    digest = bytes(view[_COUNTS.size : HEADER_BYTES])
    if check and digest != digest_of(view[: _COUNTS.size], view[HEADER_BYTES:]):
        raise DamagedResponse("it has not the digest that it was generated with")
    if due not in (None, trajectory_id):
        raise DamagedResponse(f"there is trajectory {trajectory_id}")
    mask_runs = np.frombuffer(view, _RUN, runs, tokens_at + 8 * count)
    if int(mask_runs.sum()) != count:
        raise DamagedResponse("its loss mask does not cover its tokens")
    return Response(
        trajectory_id,
        attempt,
        np.frombuffer(view, _TOKEN, count, tokens_at),
        np.frombuffer(view, _LOGPROB, count, tokens_at + 4 * count),
        [VersionSpan(*span) for span in _SPAN.iter_unpack(view[HEADER_BYTES:tokens_at])],
        mask_runs,
        digest.hex(),
    )


def digest_of(head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    """Half a SHA-256."""
    digest = hashlib.sha256(head)
    digest.update(body)  # without the interpreter's lock, where it is large
    return digest.digest()[:DIGEST_BYTES]
