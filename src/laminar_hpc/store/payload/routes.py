"""A response's routes (config/routing.py) as bytes, right behind the response in its payload file: a column
of its own, of which the response's place and digest say nothing, so that who wants tokens and log-probs alone
reads nothing of it. The trainer reads it once; it is not archived.

    header, 48 bytes   magic "LJR1", attempt u32, trajectory id i64, tokens u32, layers u32, experts per
                       token u32, bytes of an expert's number u32, digest
    numbers            u8, or i16 little-endian: [tokens, layers, experts per token]
    zeros              up to a multiple of four bytes

The digest is half a SHA-256 over all the rest.
"""

import struct
from typing import Any

import numpy as np

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.store.payload.layout import DIGEST_BYTES, DamagedResponse, Routes, digest_of

_MAGIC = b"LJR1"
_HEAD = struct.Struct("<4sIqIIII")
_HEADER_BYTES = _HEAD.size + DIGEST_BYTES
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2")}


def pack_routes(trajectory_id: int, attempt: int, routes: Routes) -> bytes:
    """`routes`: [tokens, layers, experts per token]."""
    head = _HEAD.pack(_MAGIC, attempt, trajectory_id, *routes.shape, routes.itemsize)
    body = np.ascontiguousarray(routes, _DTYPES[routes.itemsize]).tobytes()
    body += bytes(-len(body) % 4)
    return b"".join((head, digest_of(head, body), body))


def packed_bytes(tokens: int, shape: RouteShape) -> int:
    """How many bytes the routes of so many tokens take up in a payload file."""
    size = tokens * shape.token_bytes
    return _HEADER_BYTES + size + -size % 4


def unpack_routes(buffer: np.ndarray, trajectory_id: int, tokens: int, shape: RouteShape) -> Routes:
    """A view of `buffer`, uint8 of `packed_bytes`. Raises DamagedResponse for what are not the routes of
    `tokens` tokens of this trajectory."""
    view = buffer.data
    magic, _, whose, *found, width = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedResponse("there are no routes")
    if whose != trajectory_id:
        raise DamagedResponse(f"there are routes of trajectory {whose}")
    dtype, due = np.dtype(shape.dtype), [tokens, len(shape.layers), shape.per_token]
    if found != due or width != dtype.itemsize:
        what = f"[{', '.join(map(str, found))}] in {width} bytes each"
        raise DamagedResponse(f"its routes are {what}, and {due} in {dtype.itemsize} are due")
    digest = bytes(view[_HEAD.size : _HEADER_BYTES])
    if digest != digest_of(view[: _HEAD.size], view[_HEADER_BYTES:]):
        raise DamagedResponse("its routes have not the digest that they were generated with")
    return np.frombuffer(view, _DTYPES[width], tokens * shape.token_bytes // width, _HEADER_BYTES).reshape(
        due
    )
