"""Messages between a process and its children: msgpack or JSON, with the length in front; nothing pickled."""

import asyncio
import socket
import struct
from collections.abc import Callable

import msgspec

LENGTH = struct.Struct("<I")  # bytes of the frame that follows

encode = msgspec.msgpack.Encoder().encode


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises asyncio.IncompleteReadError when the other side is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def framed(message: msgspec.Struct, encode: Callable[[msgspec.Struct], bytes] = encode) -> bytes:
    """A message with its length in front, as it crosses the socket."""
    frame = encode(message)
    return LENGTH.pack(len(frame)) + frame


def receive_frame(connection: socket.socket) -> bytes | None:
    """Blocks; None when the other side is gone."""
    head = _receive(connection, LENGTH.size)
    return None if head is None else _receive(connection, LENGTH.unpack(head)[0])


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
