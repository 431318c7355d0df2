"""How messages become frames and back, by msgspec. `encode` and `decode` are the only serialisers: a frame
that does not fit its type raises msgspec.ValidationError, and never runs code."""

import msgspec

from laminar_hpc.messages.chain import (
    CutLink,
    EpochProposed,
    JoinEpoch,
    LinkDown,
    RelayHas,
    SendAgain,
    StoreOpened,
)
from laminar_hpc.messages.data import Message, ScorePart, Trajectory
from laminar_hpc.messages.membership import (
    Failure,
    GangEnded,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Rejoin,
    Stop,
    StopRequest,
    Welcome,
)
from laminar_hpc.messages.moves import (
    Import,
    Imported,
    MoveAbort,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)
from laminar_hpc.messages.publication import LaneSenders, NewWeightId, Published, WeightId
from laminar_hpc.messages.rollouts import (
    Drop,
    EngineHung,
    Generated,
    Grant,
    Holds,
    Increment,
    Leaving,
    Lost,
    NotLoaded,
    RequestWork,
    Scored,
    ScoreOrder,
    Unfinished,
    WeightsAvailable,
    WeightsOpened,
)
from laminar_hpc.messages.training import (
    Batch,
    Checkpointed,
    Continue,
    Leave,
    NotYet,
    Restored,
    StepDone,
    TakeBatch,
    TrainerDone,
    TrainersMeet,
)

AnyMessage = (
    StopRequest
    | Rejoin
    | Stop
    | Goodbye
    | Failure
    | GangEnded
    | Pong
    | Ping
    | Hello
    | Welcome
    | Increment
    | Leaving
    | Unfinished
    | EngineHung
    | WeightsAvailable
    | Drop
    | Holds
    | NotLoaded
    | Lost
    | Scored
    | ScoreOrder
    | Generated
    | Grant
    | RequestWork
    | WeightsOpened
    | MoveFailed
    | MoveAbort
    | MoveCommit
    | Imported
    | Import
    | MoveReady
    | MoveOrder
    | Reserved
    | Reserve
    | TrainerDone
    | Checkpointed
    | TrainersMeet
    | Continue
    | StepDone
    | Leave
    | NotYet
    | Batch
    | Restored
    | TakeBatch
    | Published
    | WeightId
    | NewWeightId
    | LaneSenders
    | RelayHas
    | LinkDown
    | CutLink
    | SendAgain
    | JoinEpoch
    | StoreOpened
    | EpochProposed
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_trajectory_decoder = msgspec.msgpack.Decoder(Trajectory)


class _Tokens(msgspec.Struct):
    """Of a stored trajectory only this is decoded."""

    response_tokens: list[int]


_tokens_decoder = msgspec.msgpack.Decoder(_Tokens)


def encode(value: Message | Trajectory | ScorePart) -> bytes:
    """A message, or a part of a stored trajectory, as MessagePack."""
    return _encoder.encode(value)


def decode(frame: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError (of which ValidationError is one) on anything that is not one of the
    messages above."""
    try:
        return _decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_trajectory(blob: bytes) -> Trajectory:
    """A trajectory, encoded. Raises msgspec.DecodeError on anything else."""
    return _trajectory_decoder.decode(blob)


def decode_tokens(blob: bytes) -> list[int]:
    """The response tokens of an encoded trajectory."""
    return _tokens_decoder.decode(blob).response_tokens


def with_score(response: bytes, score: bytes) -> bytes:
    """One encoded trajectory of a Trajectory without a score and a ScorePart, both encoded: the entries of
    both MessagePack maps under one header. Nothing is decoded."""
    (first, begin), (second, from_here) = _map_header(response), _map_header(score)
    return b"\xde" + (first + second).to_bytes(2, "big") + response[begin:] + score[from_here:]


def _map_header(blob: bytes) -> tuple[int, int]:
    """(entries of a MessagePack map of less than 65,536, bytes before the first)."""
    return (blob[0] & 0x0F, 1) if blob[0] >> 4 == 0x8 else (int.from_bytes(blob[1:3], "big"), 3)
