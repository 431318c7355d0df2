"""The frames of a move: a header that says what the KV cache is of, then chunk records.

    header   "LMNRKV01", u32 body length, u32 zero, u64 u64 sums of the body (weights/kernels/sums.py);
             body: a msgpack map, fields of PartHeader
    record   u32 "KCVK", u32 number, u64 payload bytes, u64 u64 sums of the payload, 32 zero bytes;
             payload, to whole 64 bytes

Little-endian. Rows are [layers, K and V, tokens] of heads * head_dim items each; chunk n holds the rows from
n * rows_per_chunk on. The decoder takes any bytes: what is not exactly such a header is refused.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.weights.kernels.sums import tensor_sums

MAGIC = b"LMNRKV01"  # the last two characters are the format's version
PREFIX = struct.Struct("<8sIIQQ")
CHUNK_HEAD_BYTES = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_TOKENS = 1 << 20
MAX_HEADER_BYTES = PREFIX.size + 4 * MAX_TOKENS + 4096
_LIMITS = {"layers": 1024, "heads": 1024, "head_dim": 1024, "page_size": 64}
# What a key's and a value's numbers depend on beside the weights, in the names of Hugging Face's config.json.
_MODEL_KEYS = (
    "model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim rope_theta "
    "rope_scaling rope_parameters "
    "rms_norm_eps sliding_window vocab_size"
).split()


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """What both pools must have alike."""

    dtype: str
    layers: int
    heads: int
    head_dim: int
    page_size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K, or V, in one layer."""
        return self.heads * self.head_dim * DTYPES[self.dtype].itemsize

    def rows_per_chunk(self, chunk_bytes: int) -> int:
        return max(1, chunk_bytes // self.row_bytes)

    def chunks(self, tokens: int, chunk_bytes: int) -> int:
        return -(-2 * self.layers * tokens // self.rows_per_chunk(chunk_bytes))

    def record_bytes(self, chunk_bytes: int) -> int:
        """From the start of a record to the next."""
        return CHUNK_HEAD_BYTES + -(-self.rows_per_chunk(chunk_bytes) * self.row_bytes // 64) * 64


class PartHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a request's KV. `token_ids` are int32, little-endian: the tokens whose KV follows, in
    order."""

    fingerprint: str
    weight_id: int
    shape: Shape
    chunk_bytes: int
    token_ids: bytes
    first: int = 0  # the place of the first of them in the request
    last: bool = True  # no part follows

    @classmethod
    def of(
        cls,
        fingerprint: str,
        weight_id: int,
        shape: Shape,
        token_ids: Sequence[int],
        chunk_bytes: int,
        first: int = 0,
        last: bool = True,
    ) -> "PartHeader":
        return cls(
            fingerprint,
            weight_id,
            shape,
            chunk_bytes,
            np.array(token_ids, dtype="<i4").tobytes(),
            first,
            last,
        )

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4

    def ids(self) -> list[int]:
        return np.frombuffer(self.token_ids, dtype="<i4").tolist()


def model_fingerprint(config: Mapping[str, object], rank: int = 0, ranks: int = 1) -> str:
    """Of a model's config.json and a tensor-parallel rank: equal where KV caches mean the same under equal
    weights."""
    chosen: dict[str, object] = {key: config.get(key) for key in _MODEL_KEYS}
    chosen |= {"rank": rank, "ranks": ranks}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def encode_header(header: PartHeader) -> bytes:
    """Raises KvRefused for a header that the decoder would refuse."""
    _check(header)
    body = msgspec.msgpack.encode(header)
    return PREFIX.pack(MAGIC, len(body), 0, *_sums(body)) + body


def decode_header(data: bytes | bytearray | memoryview) -> PartHeader:
    """The header at the start of `data`; what follows it is not looked at. Raises KvRefused for anything
    else, and nothing but that."""
    view = memoryview(data).cast("B")
    if len(view) < PREFIX.size:
        raise KvRefused(f"KV header refused: {len(view)} bytes where at least {PREFIX.size} are needed")
    magic, length, zero, words, indexed = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise KvRefused(f"KV header refused: it begins with {magic!r}, this build reads {MAGIC!r}")
    if zero or length > MAX_HEADER_BYTES - PREFIX.size or length > len(view) - PREFIX.size:
        raise KvRefused(
            f"KV header refused: it claims {length} bytes, {len(view) - PREFIX.size} are there, "
            f"at most {MAX_HEADER_BYTES} are allowed"
        )
    body = bytes(view[PREFIX.size : PREFIX.size + length])
    if _sums(body) != (words, indexed):
        raise KvRefused("KV header refused: its checksum differs")
    try:
        header = msgspec.msgpack.decode(body, type=PartHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KvRefused(f"KV header refused: {error}") from None
    _check(header)
    return header


def check_fits(header: PartHeader, *, fingerprint: str, weight_id: int, shape: Shape) -> None:
    """Raises KvRefused unless the KV cache is of this engine's model, weights and pool shape."""
    if header.fingerprint != fingerprint:
        raise KvRefused(
            f"KV cache refused: it is of model {header.fingerprint[:12]}, "
            f"this engine serves {fingerprint[:12]}"
        )
    if header.weight_id != weight_id:
        raise KvRefused(
            f"KV cache refused: it is of weight id {header.weight_id}, this engine serves {weight_id}"
        )
    if header.shape != shape:
        raise KvRefused(f"KV cache refused: it is {header.shape}, this engine's pool is {shape}")


def _check(header: PartHeader) -> None:
    shape = header.shape
    for name, limit in _LIMITS.items():
        if not 1 <= getattr(shape, name) <= limit:
            raise KvRefused(f"KV header refused: {name} is {getattr(shape, name)}, 1 to {limit} are allowed")
    if shape.dtype not in DTYPES:
        raise KvRefused(f"KV header refused: dtype {shape.dtype[:32]!r} is none of {', '.join(DTYPES)}")
    if len(header.token_ids) % 4 or not 1 <= header.tokens <= MAX_TOKENS:
        raise KvRefused(
            f"KV header refused: {len(header.token_ids)} bytes of token ids; "
            f"1 to {MAX_TOKENS} tokens of 4 bytes are allowed"
        )
    if not 0 <= header.first <= MAX_TOKENS - header.tokens:
        raise KvRefused(
            f"KV header refused: {header.tokens} tokens from place "
            f"{header.first} on; a request has {MAX_TOKENS} at most"
        )
    if (
        not 4096 <= header.chunk_bytes <= 1 << 26
        or not 0 <= header.weight_id < 1 << 63
        or not len(header.fingerprint) <= 128
    ):
        raise KvRefused("KV header refused: its chunk size, weight id or fingerprint is out of range")


def _sums(body: bytes) -> tuple[int, int]:
    return tensor_sums(torch.frombuffer(bytearray(body), dtype=torch.uint8)) if body else (0, 0)
