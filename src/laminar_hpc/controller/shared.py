"""What all parts of the controller share: configuration, state, who is in the run, and the ways out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from laminar_hpc.config.check import Derived
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.fleet.members import Member, Members
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import Failure
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.observability.metrics import MetricsWriter

# of epochs, moves, local batches and attempts of evaluations that one controller may give; each begins behind
# those of the controllers before it
NUMBERS = 1_000_000


class Outbox:
    """Filled by the handlers of one turn, emptied by `Controller.turn` after its commit."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Message]] = []

    def send(self, member: Member | None, message: Message) -> None:
        """To nobody when `member` is None: it has left."""
        if member is not None:
            self._messages.append((member.identity, message))

    def send_to(self, identity: str, message: Message) -> None:
        """To a sender that need not be a member."""
        self._messages.append((identity, message))

    def turn_failed(self) -> None:
        """Nothing of the turn is committed, so nothing of it is sent, but why somebody must end."""
        self._messages = [each for each in self._messages if isinstance(each[1], Failure)]

    def take(self) -> list[tuple[str, Message]]:
        """All of it, as (identity, message) in order."""
        messages = self._messages
        self._messages = []
        return messages


class HearsOfLosses(Protocol):
    """A part of the controller to which it matters that a replica is lost."""

    def replica_lost(self, replica: int, /) -> None: ...


@dataclass
class RunState:
    """How far the run is, and whether it ends."""

    trainer_step: int  # the version of the trainer's weights
    trainer_generation: str = (
        ""  # identity of the trainer 0 that has said, to any controller, where it starts
    )
    groups_taken: int = 0  # by the trainer, of its present step
    steps_done: int = 0  # since the trainers started
    stopping: str = ""  # why the run stops before its last step
    trainers_leave: str = ""  # why its trainers leave a run that goes on
    failure: str = ""  # why a run that stops in order has failed all the same
    trainer_done: bool = False
    finished: bool = False
    ending: bool = False  # all workers have been told to leave
    started: float = field(default_factory=time.time)

    @property
    def stops_here(self) -> bool:
        """Nothing more is granted or trained. A step that has begun is finished first."""
        return bool(self.stopping) and not self.groups_taken

    @property
    def seconds(self) -> float:
        """Since this launch."""
        return time.time() - self.started


@dataclass(frozen=True)
class Shared:
    """`say` prints a line for the user. What goes into `outbox` leaves after the turn's commit."""

    config: RunConfig
    derived: Derived
    state: RunState
    members: Members
    outbox: Outbox
    metrics: MetricsWriter
    say: Callable[[str], None]

    @property
    def roles_apart(self) -> bool:
        """Whether each role is started by itself, so that relays and rollouts may come and go."""
        return self.config.role != "all"

    def request_stop(self, reason: str) -> None:
        """The run ends after the step under way and a checkpoint."""
        state = self.state
        if state.stopping:
            return
        state.stopping = reason
        has_trainer = bool(self.members.at("trainer") or state.trainer_generation)
        if state.trainer_done:
            text = f"step {state.trainer_step} is trained and saved; the evaluation of it is left out"
        elif not has_trainer:
            text = "the trainer is not there yet, so there is nothing to save"
        elif state.groups_taken:
            text = f"finishing step {state.trainer_step + 1}, then a checkpoint"
        else:
            text = f"no step is under way; a checkpoint of step {state.trainer_step}"
        self.say(console.line("stopping", f"{reason}: {text}"))
        state.finished = state.finished or state.trainer_done or not has_trainer

    def fail(self, reason: str, why_it_stops: str) -> None:
        """As `request_stop`; the run counts as failed for the first `reason` given."""
        if not self.state.failure:
            self.state.failure = reason
            self.request_stop(why_it_stops)
