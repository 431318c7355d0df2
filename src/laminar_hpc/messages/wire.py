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
from laminar_hpc.messages.data import Message, ScorePart
from laminar_hpc.messages.homes import Ask, LetGo
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
    Answer,
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
    | Ask
    | LetGo
    | Answer
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
_score_decoder = msgspec.msgpack.Decoder(ScorePart)


def encode(value: Message | ScorePart) -> bytes:
    """A message, or a score for the store, as MessagePack."""
    return _encoder.encode(value)


def decode(frame: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError (of which ValidationError is one) on anything that is not one of the
    messages above."""
    try:
        return _decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_score(blob: bytes) -> ScorePart:
    """A score of the store. Raises msgspec.DecodeError on anything else."""
    return _score_decoder.decode(blob)
