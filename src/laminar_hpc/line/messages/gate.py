"""What a relay at another place and a gate say to each other, over CURVE sockets:

    Next(place, held)            -> Offer(shipment, size) as soon as there is one; Nothing: ask again
    Fetch(shipment, piece)       -> FetchedPiece(shipment, piece) and its bytes, or Gone

A shipment is a stream of weights/stream.py, encoded for the weights that the place holds. It is cut into
pieces, each fetched by itself over any of STREAMS connections: what a cut takes away is asked for again, and
what has come stays. Changed bytes are refused by CURVE, which ends the connection.

A small shipment has small pieces, so that all connections carry it: each begins slowly after a pause, and is
slowed down by what it loses.
"""

import msgspec

# TCP connections: one alone gets through some 2 Mbit/s at 80 ms and 1% loss (Mathis et al., 1997)
STREAMS = 32
AHEAD = 2  # pieces that are asked for on a connection at a time, so that none waits for a round trip
PIECE_BYTES = 128 << 10  # at most
_PIECE_BYTES_MIN = 16 << 10  # some ten packets
REQUEST_BYTES_MAX = 4096
HANDSHAKE_MILLISECONDS = 10_000
HELD_SECONDS = 5.0  # of a question; a link hears something before it takes the gate for gone
OUTAGE_SECONDS = 600.0  # without an answer, which what has come so far outlives
DOMAIN = b"laminar-gate"


def piece_bytes(size: int) -> int:
    """Of each piece but the last of a shipment of `size` bytes."""
    return min(PIECE_BYTES, max(_PIECE_BYTES_MIN, -(-size // (STREAMS * AHEAD))))


def pieces_of(size: int) -> int:
    """Of a shipment of `size` bytes."""
    return -(-size // piece_bytes(size))


class Next(msgspec.Struct, frozen=True, tag=True):
    """Something newer than weight id `held` (None: anything), please. The gate keeps the question for
    HELD_SECONDS until there is something, so that no publication waits for the next question."""

    place: str
    held: int | None


class Fetch(msgspec.Struct, frozen=True, tag=True):
    shipment: int
    piece: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """`size`: bytes of the shipment."""

    shipment: int
    size: int


class Nothing(msgspec.Struct, frozen=True, tag=True):
    """Nothing newer is ready."""


class FetchedPiece(msgspec.Struct, frozen=True, tag=True):
    shipment: int
    piece: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """There is no such piece any more."""

    shipment: int


Request = Next | Fetch
Reply = Offer | Nothing | FetchedPiece | Gone

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
