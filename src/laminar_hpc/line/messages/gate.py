"""What a relay at another place and a gate say to each other, over CURVE sockets:

    Next(place, held, piece) -> FetchedPiece and its bytes as soon as there is a shipment; Nothing: ask again
    Fetch(shipment, piece)   -> FetchedPiece and its bytes, or Gone

A shipment is a stream of weights/stream.py, encoded for the weights that the place holds. It is cut into
pieces, each fetched by itself over any of STREAMS connections: what a cut takes away is asked for again, and
what has come stays. Changed bytes are refused by CURVE, which ends the connection. The first pieces are asked
for before there is a shipment, so that it leaves without a round trip.

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
    """A piece of the next shipment, of weights newer than id `held` (None: of any), please. The gate keeps
    the question for HELD_SECONDS until there is one; piece 0 has it made."""

    place: str
    held: int | None
    piece: int


class Fetch(msgspec.Struct, frozen=True, tag=True):
    shipment: int
    piece: int


class Nothing(msgspec.Struct, frozen=True, tag=True):
    """Nothing newer is ready of which this could be a piece."""

    piece: int


class FetchedPiece(msgspec.Struct, frozen=True, tag=True):
    """`size`: bytes of the shipment. The answer to a question behind its last piece has no bytes."""

    shipment: int
    piece: int
    size: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """There is no such piece any more."""

    shipment: int
    piece: int


Request = Next | Fetch
Reply = Nothing | FetchedPiece | Gone

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
