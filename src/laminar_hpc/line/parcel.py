"""Numbered messages on a line that is slow or loses packets: those that wait go as one, deflated, in a fifth
of the bytes. A lost packet delays all that is behind it by more than a round trip."""

import zlib
from typing import NamedTuple

import msgspec

from laminar_hpc.line.delivery import DeliveryError, Header, Sender

MESSAGE_BYTES_MAX = 1 << 30  # a peer that sends a larger one is cut off
_PARCEL_BYTES = 64 << 10  # before they are deflated; one message may be larger
_WORTH_BYTES = 256  # less fits into a packet as it is
_LEVEL = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


class Parcel(NamedTuple):
    """Messages, the last of which has number `last`. `packed`: as in Header."""

    last: int
    packed: int
    payload: bytes


def next_parcel(sender: Sender, packs: bool) -> Parcel | None:
    """What goes on the wire next; one message without `packs`."""
    last, frames, size = 0, list[bytes](), 0
    while size < _PARCEL_BYTES and (packs or not frames) and (due := sender.peek(len(frames))) is not None:
        last, frame = due
        frames.append(frame)
        size += len(frame)
    if not frames:
        return None
    if len(frames) == 1 and not (packs and size >= _WORTH_BYTES):
        return Parcel(last, 0, frames[0])
    return Parcel(last, len(frames), zlib.compress(_encoder.encode(frames), _LEVEL))


def unpack(header: Header, payload: bytes) -> list[bytes]:
    """The messages of a parcel. Raises DeliveryError on what is none."""
    if not header.packed:
        return [payload]
    try:
        frames = _decoder.decode(zlib.decompressobj().decompress(payload, MESSAGE_BYTES_MAX))
    except (zlib.error, msgspec.DecodeError) as error:
        raise DeliveryError(f"it has {header.packed} messages that cannot be unpacked ({error})") from None
    if len(frames) != header.packed:
        raise DeliveryError(f"it has {len(frames)} messages, not {header.packed}")
    return frames
