"""The trainers as one: a trainer generation is all trainer ranks of one life, and ends as a whole when one of
them does.

    Hello -> admit -> of the present trainer generation -> Restored, steps, ...
    a rank dies, fails or stands still -> end -> TrainersEnded to the others; the next Hellos make the next
    trainer generation their job is to end -> ask_to_leave -> step, checkpoint, Goodbye of all -> end

The number of the trainer generation rises when it ends, so an earlier one is a stranger from then on: its
messages change nothing, it gets no weight ids, its links are cut and its checkpoints get no name. Called by
controller/fleet/membership.py, and once a tick. The run waits cluster.join_timeout_seconds for the next
trainer generation, and as long again whenever Slurm has its job in the queue.
"""

import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.system_schema import ClusterConfig, RelayConfig
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.shared import Shared
from laminar_hpc.line.messages.membership import Hello, TrainerProgress, TrainersEnded
from laminar_hpc.line.messages.training import TrainersMeet
from laminar_hpc.line.waiting import are_queued
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.processes import process_started
from laminar_hpc.policies.hangs import HangWatch
from laminar_hpc.policies.restarts import Restarts
from laminar_hpc.store import checkpoints
from laminar_hpc.store.store import Store

log = logging.getLogger(__name__)
_FAILURES_PER_HOUR = 10  # of trainer generations, by an error of their own
_MEETING = "trainers_meet"  # in the store: trainer generation, address, port
_LOOK_SECONDS = 1.0  # between two looks whether a rank is stuck, of which none can be within a second
_LEAVE_SECONDS = 5.0  # a rank here that was told to leave and is still alive then is stopped or stuck
_DOES = {
    "load": "loads, or trains its first step",
    "train": "trains",
    "publish": "publishes weights",
    "checkpoint": "writes a checkpoint",
}


class _Leaving(NamedTuple):
    """A process on this machine; `started` tells it from a later one of the same pid."""

    name: str
    pid: int
    started: str
    by: float


class StopCutShort(LaminarError):
    """The run was to stop, and its trainers are gone without their last checkpoint."""


class HearsOfGangs(Protocol):
    """A part of the controller that has to do with the trainers."""

    def trainers_ended(self) -> None: ...


class TrainerGeneration:
    """`told`: the parts that drop what they had with a trainer generation that has ended, in this order."""

    def __init__(self, shared: Shared, store: Store, told: Sequence[HearsOfGangs]) -> None:
        self._shared = shared
        self._members = shared.members
        self._store = store
        self._told = told
        self._run_dir = Path(shared.config.run_dir)
        self._awaited_until: float | None = None  # while the run waits for another trainer generation
        self._failures = Restarts(_FAILURES_PER_HOUR)
        self._leaving: list[_Leaving] = []
        self._looked = 0.0  # whether a rank is stuck
        self._started: dict[int, str] = {}  # by pid, of processes on this machine
        self._watch = HangWatch(
            _floors(shared.config.cluster, shared.config.relay),
            2 * shared.config.cluster.join_timeout_seconds,
        )
        # a controller that died after it wrote the fence has not committed the number
        self.number = max(store.get("gang", 0), checkpoints.newest_trainer_generation(self._run_dir))
        store.put("gang", self.number)
        ranks = shared.derived.trainer_ranks
        if store.get("gang_ranks", ranks) != ranks:
            self._rise()  # another layout has ranks that the earlier trainer generation had not
        store.put("gang_ranks", ranks)
        self._meeting = self._known_meeting()

    # ---- who comes -----------------------------------------------------------------------------------------

    def of(self, identity: str) -> int:
        """The trainer generation of a trainer rank, whichever controller it joined; 0 = not known."""
        return self._store.get(f"gang {identity}", 0)

    def has_ended(self, identity: str) -> bool:
        """That of this trainer rank."""
        return 0 < self.of(identity) < self.number

    def admit(self, identity: str, hello: Hello) -> None:
        """A rank says Hello: of this trainer generation or, where its place is taken, of the next one."""
        if not self.of(identity):
            rank = f"gang_rank {hello.index}"
            if self.number and self._store.get(rank, 0) == self.number:
                cause = f"trainer {hello.index} has started again"
                (self.end if self._members.count("trainer") else self._end_ranks)(cause)
            elif self.number == 0:
                self._rise()
            self._store.put(f"gang {identity}", self.number)
            self._store.put(rank, self.number)
        if hello.machine == self._members.machine:
            self._started[hello.pid] = process_started(hello.pid)

    def joined(self, identity: str) -> None:
        """One more rank is in, and learns where to meet the others."""
        if self._meeting is not None:
            self._shared.outbox.send_to(identity, self._meeting)
        if self._members.count("trainer") == self._shared.derived.trainer_ranks:
            self._awaited_until = None

    def _known_meeting(self) -> TrainersMeet | None:
        """Returns where trainers meet that start while controllers change."""
        trainer_generation, address, port = [*self._store.get_text(_MEETING).split(" "), "", ""][:3]
        return TrainersMeet(address, int(port)) if trainer_generation == str(self.number) else None

    def on_trainers_meet(self, member: Member, place: TrainersMeet) -> None:
        self._meeting = place
        self._store.put_text(_MEETING, f"{self.number} {place.address} {place.port}")
        for trainer in self._members.all("trainer"):
            if trainer is not member:
                self._shared.outbox.send(trainer, place)

    # ---- who goes ------------------------------------------------------------------------------------------

    def ask_to_leave(self, reason: str) -> None:
        """Their job is to end: they finish the step and write a checkpoint, and the run waits for others."""
        state = self._shared.state
        ends = state.stopping or state.trainer_done or state.trainers_leave
        if ends or not self._members.count("trainer"):
            return
        state.trainers_leave = reason
        text = f"{reason}: the trainers finish step {state.trainer_step + 1}, then a checkpoint"
        self._shared.say(console.line("leaving", f"{text}; the others go on"))

    def left(self, name: str) -> None:
        """A rank has left in order. All do where their job is to end; otherwise it is lost."""
        state, reason = self._shared.state, self._shared.state.trainers_leave
        if not reason:
            self.end(f"{name} has left")
        elif self._members.count("trainer"):
            return  # with their checkpoint on the disk, the others are about to leave too
        elif state.stopping:
            state.finished = True
        else:
            self.end(f"{reason}: the trainers have left")

    def failed(self, name: str, text: str) -> None:
        """A rank ends by its own error. Raises LaminarError when another generation would meet it too."""
        cause = f"{name} failed: {text}"
        why_not = self._failures.refusal(cause, self._shared.state.trainer_step, time.time())
        if why_not:
            raise LaminarError(f"{cause}; other trainers are not awaited: {why_not}")
        self.end(cause)

    def end(self, cause: str) -> None:
        """A rank is lost, so all of them are: the run waits for the next trainer generation. Raises
        LaminarError when it was about to stop (StopCutShort)."""
        shared, seconds = self._shared, self._shared.config.cluster.join_timeout_seconds
        if shared.state.stopping:
            raise StopCutShort(f"{cause}, before the run could stop; go on with resume=auto")
        self._end_ranks(cause)
        shared.metrics.write("gang_ended", gang=self.number - 1, step=shared.state.trainer_step, reason=cause)
        log.error(cause)
        shared.say(f"{cause}; the others go on, and wait up to {seconds:.0f} s for trainers to start again")

    def _end_ranks(self, cause: str) -> None:
        ended = self.number
        self._rise()
        now = time.monotonic()
        for trainer in self._members.all("trainer"):
            self._shared.outbox.send(
                trainer, TrainersEnded(f"generation {ended} of trainers has ended: {cause}")
            )
            self._members.leave(trainer)
            if (started := self._started.get(trainer.hello.pid)) and trainer.hello.pid != os.getpid():
                self._leaving.append(_Leaving(trainer.name, trainer.hello.pid, started, now + _LEAVE_SECONDS))
        self._started.clear()
        self._meeting = None
        self._watch.forget()
        self._shared.state.trainers_leave = ""
        for part in self._told:
            part.trainers_ended()
        are_queued(self._run_dir)  # what was seen before does not count
        self._awaited_until = now + self._shared.config.cluster.join_timeout_seconds

    def _rise(self) -> None:
        """From here on an earlier trainer generation can give no checkpoint its name."""
        self.number += 1
        self._store.put("gang", self.number)
        checkpoints.fence(self._run_dir, self.number)

    # ---- progress ------------------------------------------------------------------------------------------

    def on_progress(self, member: Member, progress: TrainerProgress) -> None:
        self._watch.heard(member.hello.index, progress.phase, progress.count, time.monotonic())

    def tick(self, now: float) -> None:
        """Raises LaminarError when no other trainer generation comes in time, or, in one world, when a
        rank is stuck."""
        self._kill_those_who_stay(now)
        state = self._shared.state
        if state.trainer_done or state.ending:
            return
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if self._awaited_until is not None and now > self._awaited_until:
            self._await_longer(now)
        if (stuck := self._watch.look(now)) is None:
            return
        normal = "" if stuck.longest is None else f" (at most {stuck.longest:.1f} s before)"
        text = (
            f"trainer {stuck.rank} has made no progress for {stuck.seconds:.0f} s while it "
            f"{_DOES[stuck.phase]}{normal}"
        )
        if not self._shared.roles_apart:
            raise LaminarError(f"{text}; go on with the same command and resume=auto")
        self.end(text)

    def _await_longer(self, now: float) -> None:
        """Another trainer generation has not come in time: its job may wait for nodes."""
        shared, ranks = self._shared, self._shared.derived.trainer_ranks
        seconds = shared.config.cluster.join_timeout_seconds
        text = f"waited {seconds:.0f} s for trainers to start again (cluster.join_timeout_seconds)"
        if shared.state.stopping:
            raise StopCutShort(f"{text}, before the run could stop; go on with resume=auto")
        if not are_queued(self._run_dir):
            missing = ranks - self._members.count("trainer")
            raise LaminarError(
                f"{text}; {missing} of {ranks} are missing; start all roles again with resume=auto: the run "
                "goes on from its newest checkpoint"
            )
        self._awaited_until = now + seconds
        shared.say(console.line("waits", f"{text}: their job is in Slurm's queue; the others go on"))

    def _kill_those_who_stay(self, now: float) -> None:
        """A stopped process cannot leave, and its agent waits for it."""
        for each in [each for each in self._leaving if now > each.by]:
            self._leaving.remove(each)
            if process_started(each.pid) == each.started:
                log.warning("%s (pid %d) was told to leave and is still here: killed", each.name, each.pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(each.pid, signal.SIGKILL)


def _floors(cluster: ClusterConfig, relay: RelayConfig) -> dict[str, float]:
    """Seconds that a trainer rank may always need in a phase: what bounds its own waits there. Waiting for
    the controller is bounded by cluster.batch_timeout_seconds alone."""
    return {
        "load": cluster.join_timeout_seconds,
        "train": cluster.heartbeat_timeout_seconds,
        "publish": 4 * relay.publish_timeout_seconds,
        # as long as a rank waits for its files to be on the disk, and a minute (checkpointing/in_flight.py)
        "checkpoint": 2 * cluster.join_timeout_seconds + 60.0,
    }
