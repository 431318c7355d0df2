"""How messages become frames and back, by msgspec. `encode` and `decode` are the only serialisers: a frame
that does not fit its type raises msgspec.ValidationError, and never runs code."""

import functools
import operator

import msgspec

from laminar_hpc.line.messages import (
    chain,
    homes,
    membership,
    moves,
    parking,
    places,
    publication,
    rollouts,
    training,
)
from laminar_hpc.line.messages.data import Message, ScorePart

MESSAGES: list[type[Message]] = [  # all that may be decoded
    kind
    for conversation in (chain, homes, membership, moves, parking, places, publication, rollouts, training)
    for kind in vars(conversation).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == conversation.__name__
]
AnyMessage = Message  # one of them

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, MESSAGES))
_score_decoder = msgspec.msgpack.Decoder(ScorePart)


def encode(value: Message | ScorePart) -> bytes:
    """A message, or a score for the store, as MessagePack."""
    return _encoder.encode(value)


def decode(frame: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError (of which ValidationError is one) on anything that is none of MESSAGES."""
    try:
        return _decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_score(blob: bytes) -> ScorePart:
    """A score of the store. Raises msgspec.DecodeError on anything else."""
    return _score_decoder.decode(blob)
