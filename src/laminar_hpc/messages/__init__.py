"""Every message between processes, as msgspec structs (msgpack on the wire); nothing else crosses.

`encode` and `decode` are the only serialisers: a frame that does not fit its type raises
msgspec.ValidationError, never runs code. Times are seconds since the Unix epoch; weight ids are counters of
the store (0 = the user's model directory).
"""

import msgspec

from laminar_hpc.messages.data import (
    Message as Message,
)
from laminar_hpc.messages.data import (
    Partial as Partial,
)
from laminar_hpc.messages.data import (
    PromptGroup as PromptGroup,
)
from laminar_hpc.messages.data import (
    ReplicaLoad as ReplicaLoad,
)
from laminar_hpc.messages.data import (
    Sample as Sample,
)
from laminar_hpc.messages.data import (
    Trajectory as Trajectory,
)
from laminar_hpc.messages.data import (
    VersionSpan as VersionSpan,
)
from laminar_hpc.messages.moves import (
    Import as Import,
)
from laminar_hpc.messages.moves import (
    Imported as Imported,
)
from laminar_hpc.messages.moves import (
    MoveAbort as MoveAbort,
)
from laminar_hpc.messages.moves import (
    MoveCommit as MoveCommit,
)
from laminar_hpc.messages.moves import (
    MoveFailed as MoveFailed,
)
from laminar_hpc.messages.moves import (
    MoveOrder as MoveOrder,
)
from laminar_hpc.messages.moves import (
    MoveReady as MoveReady,
)
from laminar_hpc.messages.moves import (
    Reserve as Reserve,
)
from laminar_hpc.messages.moves import (
    Reserved as Reserved,
)

# ---- all roles <-> controller ------------------------------------------------------------------------------


class Hello(Message):
    """First message of a worker. `incarnation` differs after a restart; `machine` names the host whose shared
    memory it sees."""

    role: str
    index: int
    incarnation: str
    pid: int
    machine: str


class Welcome(Message):
    """Answer to Hello: the state to join with.

    `restored_step` is -1 for a fresh run, else the step of the checkpoint to load. `model` is
    OWNER/NAME@COMMIT of a model of the Hugging Face hub, else empty: all machines of a run take the same
    commit.
    """

    run_id: str
    restored_step: int
    trainer_step: int
    newest_weight_id: int
    model: str = ""


class Ping(Message):
    """A worker's sign of life, once a second; a rollout's says how loaded it is."""

    load: ReplicaLoad | None = None


class Pong(Message):
    pass


class Failure(Message):
    """A worker ends with this error, and the run with it. From the controller: end with this error."""

    text: str


class Goodbye(Message):
    """A worker has finished its work and leaves with exit code 0."""


class Stop(Message):
    """Controller to workers: leave now. Trainers get it only after they have said that their checkpoint is on
    disk."""

    reason: str


class Rejoin(Message):
    """To a worker that was taken for dead and is heard again: say Hello once more."""


class StopRequest(Message):
    """From `laminar stop` or a signal: finish the step, checkpoint, leave."""

    reason: str


# ---- rollout <-> controller --------------------------------------------------------------------------------


class WeightsOpened(Message):
    """A replica has loaded and verified these weights. `probe_logprobs`: its log-probs of the run's fixed
    probe at this id."""

    weight_id: int
    weight_step: int
    seconds: float
    parts: dict[str, float]
    probe_logprobs: list[float]
    time: float


class RequestWork(Message):
    """An idle replica at this id asks for a local batch; it supersedes an earlier request of the same
    replica. `seen`: the newest batch that it was granted in this life; a request that a grant crossed on its
    way is void."""

    weight_id: int
    seen: int = -1


class Grant(Message):
    """A local batch: a closed set of groups on one weight id. `evaluation` names the evaluation it belongs
    to, "" for training.

    `parts`: responses so far, by trajectory, of those that go on from a replica that is dead. Then the
    replica may serve other weights, or none yet: it loads these from a slot that still holds them. Answer if
    there is none: NotLoaded.
    """

    batch_id: int
    weight_id: int
    weight_step: int
    groups: list[PromptGroup]
    temperature: float
    max_response_tokens: int
    evaluation: str = ""
    parts: dict[int, Partial] = msgspec.field(default_factory=dict)


class NotLoaded(Message):
    """The weights of this grant are in no slot any more; nothing of it was begun, and the replica asks for
    work again."""

    batch_id: int
    reason: str


class Generated(Message):
    """The last token of a trajectory was generated; its score follows in Scored."""

    trajectory: Trajectory
    evaluation: str = ""


class Scored(Message):
    trajectory_id: int
    attempt: int
    reward: float
    parts: dict[str, float]
    error: str  # "" | what the reward function did wrong
    time: float
    evaluation: str = ""


class Lost(Message):
    """This attempt came to nothing (engine error, mixed versions); the controller gives the sample out
    again."""

    trajectory_id: int
    attempt: int
    reason: str
    evaluation: str = ""


class Increment(Message):
    """More of a response, for the partial-response pool: its tokens from `start` on."""

    trajectory_id: int
    attempt: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]  # of these tokens; places count from the beginning of the response
    time_started: float


class WeightsAvailable(Message):
    """Controller to the rollouts of one machine: their relay holds these weights now."""

    weight_id: int
    weight_step: int


# ---- trainer <-> controller (rank 0 of the trainer world only, but for Hello and Failure) ------------------


class TakeBatch(Message):
    """Asks for the batch that turns weights of step `step` into `step + 1`, or with consumption as a stream
    for its next mini-batch."""

    step: int
    part: int = 0


class Batch(Message):
    step: int
    trajectories: list[Trajectory]
    samples_per_prompt: int


class StoredBatch(Message, tag="Batch"):
    """What the controller sends as Batch: trajectories as they are in the store, not decoded and encoded
    again."""

    step: int
    trajectories: list[msgspec.Raw]
    samples_per_prompt: int


class NotYet(Message):
    """The batch is not there yet, and why; sent about once a second while the trainer waits."""

    step: int
    reason: str


class Leave(Message):
    """Answer to TakeBatch or StepDone: checkpoint now, then say TrainerDone."""

    reason: str


class StepDone(Message):
    """Step `step` is in the weights (step + 1 is the version now). The answer is Continue or Leave.

    `gaps`: trajectory id -> mean |log-prob by the trainer - by the engine| over its trained tokens when it
    was trained, and how many mini-batches the trainer's weights were ahead of the engine's then: with 0 the
    two should agree, with more they have moved apart.
    """

    step: int
    metrics: dict[str, float]
    gaps: dict[int, tuple[float, int]] = msgspec.field(default_factory=dict)


class Continue(Message):
    pass


class TrainersMeet(Message):
    """Where the trainers' world meets: trainer 0's store, told to the others through the controller."""

    address: str
    port: int


class LaneSenders(Message):
    """The trainer rank that sends each lane; said once, before any link is made. Without lanes rank 0 sends,
    and nothing is said."""

    ranks: list[int]


class NewWeightId(Message):
    step: int


class WeightId(Message):
    """Answer to NewWeightId; `relays` are to receive these weights, one from the other."""

    weight_id: int
    step: int
    relays: int = 1


class Published(Message):
    """The weights have left the trainer. `probe_logprobs`: the trainer's log-probs of the fixed probe at this
    id."""

    weight_id: int
    step: int
    stall_seconds: float  # in which the trainer stood still, without those of the probe
    probe_seconds: float
    seconds: float  # from the request of an id to the last byte
    bytes: int  # that left for relays, layout and sums included
    probe_logprobs: list[float]
    time: float
    full_bytes: int = 0  # that would have left in full
    changed: float | None = None  # fraction of elements, with relay.delta=auto and an id before


class Checkpointed(Message):
    step: int
    path: str
    seconds: float
    state_hash: str  # SHA-256 over weights, optimizer state and RNG


class TrainerDone(Message):
    step: int
    weight_id: int  # the last id that was published


# ---- trainer, relay <-> controller: the chain's links, each made in an epoch of its own --------------------


class EpochProposed(Message):
    """To the trainer rank of a lane or a relay: open a store and link to `relays[0]`, behind which the others
    stand in chain order.

    The link takes the place of an earlier one to the same side. Epochs of lane l of L leave l when divided by
    L. `resend`: none of these relays holds the newest weights, so what was sent last must be sent again.
    """

    epoch: int
    relays: list[int]
    resend: bool = True


class StoreOpened(Message):
    """From the sending end of a link: its store listens here."""

    epoch: int
    host: str
    port: int


class JoinEpoch(Message):
    """To the receiving end of a link: the sending one, `peer`, waits at this store."""

    epoch: int
    host: str
    port: int
    peer: str


class SendAgain(Message):
    """To a relay: send your newest weights over the link of this epoch, for `relays` that stand behind it and
    miss them."""

    epoch: int
    relays: int


class LinkDown(Message):
    """From the trainer or a relay: the link of this epoch broke. The controller has it made anew, around
    whoever is gone."""

    epoch: int
    text: str


class RelayHas(Message):
    """A relay holds these weights, or its lane's part of them, with equal sums. `passed_on`: the epoch of the
    link that they went on over; 0 = none. `complete`: so do the other lanes of its machine, whose rollouts
    may load them.

    `bytes` 0: it has had them since before it was taken for dead.
    """

    weight_id: int
    weight_step: int
    bytes: int
    seconds: float
    time: float
    passed_on: int = 0
    complete: bool = True


AnyMessage = (
    Hello
    | Welcome
    | Ping
    | Pong
    | Failure
    | Goodbye
    | Stop
    | Rejoin
    | StopRequest
    | WeightsOpened
    | RequestWork
    | Grant
    | Generated
    | Scored
    | Lost
    | NotLoaded
    | WeightsAvailable
    | TakeBatch
    | Batch
    | NotYet
    | Leave
    | StepDone
    | Continue
    | TrainersMeet
    | LaneSenders
    | NewWeightId
    | WeightId
    | Increment
    | Reserve
    | Reserved
    | MoveOrder
    | MoveReady
    | Import
    | Imported
    | MoveCommit
    | MoveAbort
    | MoveFailed
    | Published
    | Checkpointed
    | TrainerDone
    | EpochProposed
    | StoreOpened
    | JoinEpoch
    | SendAgain
    | LinkDown
    | RelayHas
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_trajectory_decoder = msgspec.msgpack.Decoder(Trajectory)


def encode(value: Message | Trajectory) -> bytes:
    return _encoder.encode(value)


def decode(frame: bytes) -> AnyMessage:
    """Raises msgspec.DecodeError (of which ValidationError is one) on anything that is not one of the
    messages above."""
    try:
        return _decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_trajectory(blob: bytes) -> Trajectory:
    return _trajectory_decoder.decode(blob)
