"""All roles and the controller: joining, signs of life, failures, leaving."""

from typing import Annotated, Literal

import msgspec

from laminar_hpc.line.messages.data import Message, ReplicaLoad
from laminar_hpc.line.starter_id import PATTERN

# what a decoder lets pass: no number that a table or the system would stumble over
UNNUMBERED = -1  # a rollout that the controller is to number
Index = Annotated[int, msgspec.Meta(ge=UNNUMBERED, lt=1 << 31)]
StarterId = Annotated[str, msgspec.Meta(pattern=PATTERN)]
ProcessId = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]


class Hello(Message):
    """First message of a worker. `incarnation` differs after a restart; `machine` names the host whose shared
    memory it sees. `index` is its number within its role, or UNNUMBERED until a Welcome has given it one.
    `rejoins`: it was welcomed before, perhaps by a controller that has put nothing of it on record. `place`:
    cluster.place. `starter_id`: of a
    rollout, what whoever has started it calls it (line/starter_id.py), "" = nobody has said."""

    role: str
    index: Index
    incarnation: str
    pid: ProcessId
    machine: str
    rejoins: bool = False
    place: str = ""
    starter_id: StarterId = ""

    @property
    def name(self) -> str:
        return self.role if self.index == UNNUMBERED else f"{self.role} {self.index}"

    @property
    def identity(self) -> str:
        """Of the process, for its whole life: made of its first Hello, by whose number it stays known."""
        return f"{self.role}:{self.index}:{self.incarnation}"

    def numbered(self, index: int) -> "Hello":
        """What it says from now on; `index` UNNUMBERED gives it no other number."""
        return self if index == UNNUMBERED else msgspec.structs.replace(self, index=index)

    def welcomed(self, index: int) -> "Hello":
        """What it says after a Welcome."""
        return msgspec.structs.replace(self.numbered(index), rejoins=True)


class Welcome(Message):
    """Answer to Hello: the state to join with.

    `model` is OWNER/NAME@COMMIT of a model of the Hugging Face hub, else empty: all machines of a run take
    the same commit. `store_id` names the store that knows all trajectories of the run (store/store.py),
    `epoch` counts the controller's starts over it, from 0, and `trainer_generation` the lives of the
    trainers, from 1.

    `index` is the worker's number within its role: it keeps it for its life, at every controller.

    `slots` names the run's folder of weight slots in shared memory, "" = `run_id`; with roles apart
    it stays over controllers. `received` is the newest message of this worker that the store has
    (line/delivery.py). A worker gets another Welcome when it has joined anew: after a Rejoin, or at
    another controller over the same store, which has another `run_id`.
    """

    run_id: str
    model: str = ""
    store_id: str = ""
    epoch: int = 0
    trainer_generation: int = 0
    received: int = 0
    slots: str = ""
    index: Index = UNNUMBERED

    @property
    def slots_name(self) -> str:
        return self.slots or self.run_id


class TrainerProgress(msgspec.Struct):
    """What a trainer rank does, and how many signs of progress it has made since it started. In `wait` it
    waits for the controller; `publish`: until nothing reads the live weights, or for the probe."""

    phase: Literal["load", "wait", "train", "publish", "checkpoint"]
    count: int


class Ping(Message):
    """A worker's sign of life, each second; a rollout's says how loaded it is, a trainer's how far."""

    load: ReplicaLoad | None = None
    progress: TrainerProgress | None = None


class Pong(Message):
    """Answer to Ping: the controller's sign of life."""


class Failure(Message):
    """A worker ends with this error. From the controller: end with this error. `permanent`: whoever starts
    in its place would end so as well."""

    text: str
    permanent: bool = False


class TrainersEnded(Message):
    """To a trainer rank: others take the place of its trainer generation. It ends at once."""

    reason: str


class Goodbye(Message):
    """A worker has finished its work and leaves with exit code 0."""


class Stop(Message):
    """Controller to workers: leave now. Trainers get it only after their checkpoint is on disk."""

    reason: str


class Release(Message):
    """Controller to a rollout that the run needs no more: leave in order, as at a TERM."""


class Rejoin(Message):
    """To a worker that was taken for dead and is heard again: say Hello once more."""


class StopRequest(Message):
    """From `laminar stop` or a signal: finish the step, checkpoint, leave. `trainers_only`: those, as their
    job is to end; the run goes on, and waits for others."""

    reason: str
    trainers_only: bool = False
