"""Who comes and goes: Hello, strangers, refusals, deaths, and what each means for the run.

In one world every loss ends the run. With roles apart the others go on without a relay or a
rollout, and wait for other trainers (controller/fleet/trainer_generation.py).
"""

import logging
import time
from typing import TYPE_CHECKING

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.fleet.trainer_generation import TrainerGeneration
from laminar_hpc.controller.takeover import Reattachment
from laminar_hpc.data.pretrained import recorded_name
from laminar_hpc.line.agent_line import orders
from laminar_hpc.line.endings import SAME_VERSION
from laminar_hpc.line.messages.membership import (
    UNNUMBERED,
    Failure,
    Goodbye,
    Hello,
    Ping,
    Rejoin,
    Stop,
    TrainersEnded,
    Welcome,
)
from laminar_hpc.line.messages.rollouts import WeightsAvailable
from laminar_hpc.line.messages.wire import AnyMessage
from laminar_hpc.machine.processes import oom_kills, process_is_alive
from laminar_hpc.store.gone_writers import GoneWriters

if TYPE_CHECKING:
    from laminar_hpc.controller.parts import Flow

log = logging.getLogger(__name__)
REPLACED = "other trainers have taken the place of these"
ROLES = ("trainer", "relay", "rollout")
_NEXT_NUMBER = "next_replica"  # in the store
_UNNUMBERED = f"rollout:{UNNUMBERED}:"  # identities of rollouts that a controller has numbered
_MEMORY_CURES = {
    "trainer": "give the container more, lower trainer.tokens_per_microbatch or use more trainer ranks",
    "rollout": "give the container more or lower rollout.kv_cache_tokens",
    "relay": "give the container more or lower relay.slots",
}


class Membership:
    """Takes members in and out, and tells the parts that have to do with them, most of them of `flow`."""

    def __init__(
        self,
        flow: "Flow",
        run_id: str,
        trainer_generation: TrainerGeneration,
        gone: GoneWriters,
        reattachment: Reattachment,
    ) -> None:
        self._flow = flow
        self._members = flow.members
        self._outbox = flow.outbox
        self._run_id = run_id
        self._trainer_generation = trainer_generation
        self._gone = gone
        self._reattachment = reattachment
        self._oom_kills = oom_kills()

    # ---- who comes -----------------------------------------------------------------------------------------

    def on_hello(self, identity: str, hello: Hello) -> None:
        if not _has_place(identity, hello):
            return self.refuse(identity, f"{hello.role} {hello.index} is no place in this run")
        if identity.startswith(_UNNUMBERED) and self._gone.is_gone(hello.index):
            text = f"{hello.name} was away for so long that its work has gone to others: start another"
            return self._outbox.send_to(identity, Failure(text))
        if hello.role == "rollout":
            hello = hello.numbered(self._number_of(identity, hello))
        if rival := self._members.rival(hello):
            where = f"pid {rival.hello.pid} on {rival.hello.machine}"
            cure = "" if hello.role == "rollout" else ", or set first_index"
            text = f"{rival.name} is in this run already ({where}): start another run_dir{cure}"
            return self._outbox.send_to(identity, Failure(text))
        trains = hello.role == "trainer"
        if self._trainer_generation.has_ended(identity):
            return self._outbox.send_to(identity, TrainersEnded(REPLACED))
        if trains:
            self._trainer_generation.admit(identity, hello)
        is_member = self._members.of(identity) is not None
        earlier = self._members.join(identity, hello)
        if earlier and earlier.identity != identity:
            self._forget(earlier)
        log.info("%s joined (pid %d on %s)", hello.name, hello.pid, hello.machine)
        self._outbox.send_to(identity, self._welcome(identity, hello.index))
        if not is_member and (member := self._members.of(identity)):
            self._came(member)
        if self._flow.state.ending:
            self._outbox.send_to(identity, Stop(self._flow.state.stopping or "done"))
        if trains:
            self._trainer_generation.joined(identity)
        elif hello.role == "relay":
            self._flow.weights.relay_joined(identity, hello)
        elif hello.role == "rollout" and (newest := self._flow.weights.newest_on(hello.machine)):
            self._outbox.send_to(identity, WeightsAvailable(*newest))
        return None

    def _number_of(self, identity: str, hello: Hello) -> int:
        """The number that this rollout has, or gets now: in one world its rank. A number is given once in the
        life of a store, so that nothing of a replica that was lost, and wakes, is taken for another's."""
        member, store = self._members.of(identity), self._flow.store
        if hello.index == UNNUMBERED and member is not None:  # it has not had its Welcome
            return member.hello.index
        following = store.get(_NEXT_NUMBER, 0)
        index = following if hello.index == UNNUMBERED else hello.index
        if index >= following:
            store.put(_NEXT_NUMBER, index + 1)
        return index

    def _came(self, member: Member) -> None:
        """A worker has come that was no member."""
        role, index = member.hello.role, member.hello.index
        if (role, index) == ("trainer", 0) and member.identity != self._flow.state.trainer_generation:
            self._flow.continuation.other_trainers()
        if role == "rollout":
            self._flow.active_replicas.joined(index)
            self._gone.came(index)
        self._reattachment.joined(member)

    def _welcome(self, identity: str, index: int) -> Welcome:
        model, store = str(recorded_name(self._flow.config.model.path) or ""), self._flow.store
        trainer_generation = self._trainer_generation.of(identity) or self._trainer_generation.number
        epoch = store.get("restore_epoch", 0)
        return Welcome(
            self._run_id,
            model,
            store.store_id,
            epoch,
            trainer_generation,
            slots=self._flow.slots,
            index=index,
        )

    def on_stranger(self, identity: str, message: AnyMessage) -> None:
        """A worker that was taken for dead may come back, unless another process has taken its place."""
        log.warning("%s from %s, which is no member any more, was refused", type(message).__name__, identity)
        if self._flow.state.ending or not self._flow.roles_apart or not isinstance(message, Ping):
            return
        if self._trainer_generation.has_ended(identity):
            return self._outbox.send_to(identity, TrainersEnded(REPLACED))
        role, index, *_ = [*identity.split(":"), ""]
        if role not in ROLES or not (index.isdecimal() or identity.startswith(_UNNUMBERED)):
            return self.refuse(identity, "it is no role and index")
        replaced = self._members.at(role, int(index)) is not None  # no other gets a number that was given
        answer = Stop(f"another {role} {index} has taken its place") if replaced else Rejoin()
        self._outbox.send_to(identity, answer)

    # ---- who goes ------------------------------------------------------------------------------------------

    def refuse(self, identity: str, reason: str) -> None:
        """The sender has the run's key, so it is a bug or another version. The content of its message is
        lost, and whoever waits for it would time out: the sender ends with this reason, and so does the run,
        unless it can do without it."""
        member = self._members.of(identity)
        text = f"a message from {member.name if member else identity} was refused: {reason}; {SAME_VERSION}"
        log.error(text)
        self._outbox.send_to(identity, Failure(text))
        if member is None or self._flow.state.ending:
            return
        if self._is_needed(member):
            raise LaminarError(text)
        self._leave(member)
        if not orders().one_terminal:
            self._flow.say(f"{text}; the others go on")

    def _is_needed(self, member: Member) -> bool:
        """Whether the run cannot go on without it."""
        return not self._flow.roles_apart or member.hello.role == "trainer"

    def _leave(self, member: Member) -> None:
        self._members.leave(member)
        self._forget(member)

    def _forget(self, member: Member) -> None:
        """What a lost rollout had in hand goes to others; a lost relay's neighbours are joined."""
        role, index = member.hello.role, member.hello.index
        if role == "relay" and self._members.at("relay", index) is None:
            self._flow.weights.relay_lost(member.hello)
            self._flow.parking.relay_lost(index)
        if role == "rollout":
            for part in self._flow.told_of_losses:
                part.replica_lost(index)
            self._gone.away(index, time.monotonic())
            if member.hello.machine == self._members.machine and not process_is_alive(member.hello.pid):
                self._gone.ended(index)

    def on_goodbye(self, member: Member, _: Goodbye) -> None:
        self._leave(member)
        if self._ends_trainers(member):
            self._trainer_generation.left(member.name)
        if member.hello.role == "rollout":
            self._gone.ended(member.hello.index)

    def _ends_trainers(self, member: Member) -> bool:
        """Whether its loss makes the run wait for other trainers."""
        state = self._flow.state
        trains = member.hello.role == "trainer" and self._flow.roles_apart
        return trains and not (state.ending or state.trainer_done)

    def on_failure(self, member: Member, failure: Failure) -> None:
        self._members.leave(member)
        if self._ends_trainers(member) and not failure.permanent:
            return self._trainer_generation.failed(member.name, failure.text)
        if self._is_needed(member):
            if not self._flow.state.ending:
                raise LaminarError("a worker has failed")  # it has said itself why
            return
        text = f"{member.name} failed: {failure.text}"
        log.error(text)
        if not orders().one_terminal:
            self._flow.say(f"{text}; the others go on")
        self._forget(member)

    def remove_dead(self) -> None:
        """Takes out all members that have died or have been silent for too long."""
        for member in self._members.dead():
            if self._members.of(member.identity) is not None:  # not yet gone with its trainer generation
                self._on_death(member)

    def _on_death(self, member: Member) -> None:
        """Raises LaminarError when the run cannot go on without it."""
        ends_trainers = self._ends_trainers(member)
        if not ends_trainers:  # else with its trainer generation: it may be stopped, not dead
            self._leave(member)
        hello, state = member.hello, self._flow.state
        if state.ending or (state.trainer_done and hello.role == "trainer"):
            return
        text = (
            f"{member.name} (pid {hello.pid} on {hello.machine}) {self._cause_of_death(member)}; "
            f"see logs/{hello.role}{hello.index}.log in the run directory"
        )
        if ends_trainers:
            return self._trainer_generation.end(text)
        on_this_machine = hello.machine == self._members.machine
        has_been_said = orders().one_terminal and on_this_machine and not process_is_alive(hello.pid)
        if has_been_said and hello.role == "trainer":
            raise LaminarError("a worker has failed")
        if self._is_needed(member):
            raise LaminarError(f"{text}, then go on with the same command and resume=auto")
        log.error(text)
        if not has_been_said:
            self._flow.say(f"{text}; the others go on")

    def _cause_of_death(self, member: Member) -> str:
        if member.hello.machine != self._members.machine:
            return "has been silent for too long or has died"
        if process_is_alive(member.hello.pid):
            return "has been silent for too long"
        if oom_kills() > self._oom_kills:
            cure = _MEMORY_CURES.get(member.hello.role, "give the container more")
            return f"was killed for want of memory: {cure}"
        return "has died"


def _has_place(identity: str, hello: Hello) -> bool:
    """Whether the sender may be what it says it is."""
    if hello.role == "rollout" and identity.startswith(_UNNUMBERED):
        return True
    own = identity.startswith(f"{hello.role}:{hello.index}:")
    return hello.role in ROLES and hello.index != UNNUMBERED and own
