"""The controller's loop: receive or tick, decide by the policies, one transaction, then send.

    rollouts --Generated, Scored--> [tracker] --choose--> Batch --> trainer --StepDone--> version + 1
    trainer --NewWeightId--> id; relays --RelayHas--> WeightsAvailable --> rollouts pull
    rollouts --RequestWork--> [admission] --> Grant

    waits                  for                               bounded by
    trainer (TakeBatch)    groups that admission.choose      cluster.batch_timeout_seconds; it says why once
                           takes                             a second
    replica (RequestWork)  quota of admission.quota          the next weights, which the trainer makes from
                                                             what is there
    end of a run           Goodbye of all                    cluster.stop_timeout_seconds

One thread. Handlers only change state and fill the outbox; `turn` commits, then acknowledges and sends.
Nothing is sent before its transaction commits, which also holds how far each worker's stream was taken.
controller/fleet/handlers.py says who takes which message.
"""

import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.fleet.handlers import Handlers, handlers
from laminar_hpc.controller.parts import Protocols, make_flow, make_protocols
from laminar_hpc.controller.tables import Tables
from laminar_hpc.line.hub import Hub, UnreadableMessage
from laminar_hpc.line.messages.membership import Hello, Stop, StopRequest
from laminar_hpc.line.messages.wire import AnyMessage
from laminar_hpc.machine.observability.trace import Trace

_TICK_SECONDS = 0.1
_SPAN_SECONDS = 0.003  # shorter turns are not traced: there are thousands, and they hold nobody up


@dataclass(frozen=True, kw_only=True)
class Controller(Protocols):
    """All of a run that is in memory, and its loop."""

    hub: Hub
    trace: Trace
    handlers: dict[str, Handlers]

    # ---- one turn ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        arrived = self.hub.poll(0.0 if self.dispatcher.take_more() else _TICK_SECONDS)
        self.store.assure()  # it may have stood still while it listened
        self.store.look()
        self.members.listened_until(self.hub.heard_until)
        begun = time.time()
        try:
            for identity, message in arrived:
                self.handle(identity, message)
            self.tick()
            decided = time.time()
            self.continuation.note()
            self.store.note_received(self.hub.received())
            self.store.commit()
        except BaseException as error:
            self.outbox.turn_failed()  # nothing of it was acknowledged
            with suppress(sqlite3.DatabaseError):
                self.store.roll_back()
            if type(error) is sqlite3.DatabaseError:  # neither a full disk nor a mistake in a statement
                text = f"{self.store.path} was damaged while the run used it ({error})"
                self.store.suspect()
                raise LaminarError(f"{text}; it is made again from memory: go on with resume=auto") from None
            raise
        committed = time.time()
        for identity in self.members.take_left():
            self.hub.end(identity)
        self.hub.committed()
        self.send_all()
        if decided - begun > _SPAN_SECONDS:
            self.trace.record("decide", begun, decided, messages=len(arrived))
        if committed - decided > _SPAN_SECONDS:
            self.trace.record("commit", decided, committed)

    def send_all(self) -> None:
        for identity, message in self.outbox.take():
            self.hub.send(identity, message)

    def handle(self, identity: str, message: AnyMessage | UnreadableMessage) -> None:
        if isinstance(message, UnreadableMessage):
            self.membership.refuse(identity, message.reason)
        elif isinstance(message, Hello):
            self.membership.on_hello(identity, message)
        elif isinstance(message, StopRequest):
            stop = self.trainer_generation.ask_to_leave if message.trainers_only else self.request_stop
            stop(message.reason)
        elif (member := self.members.of(identity)) is None:
            self.membership.on_stranger(identity, message)
        else:
            member.last_seen = time.monotonic()
            handler = self.handlers[member.hello.role].get(type(message))
            if handler is None:
                reason = f"a {member.hello.role} sends no {type(message).__name__}"
                return self.membership.refuse(identity, reason)
            handler(member, message)
            self.failover.place_orphans()
        return None

    def tick(self) -> None:
        self.membership.remove_dead()
        if self.state.ending:
            return
        now = time.monotonic()
        if self.reattachment.tick(now):
            self.continuation.finish()
        self.trainer_generation.tick(now)
        self.weights.update_chains()
        self.training.answer_trainer()
        self.last_evaluation.tick(now)
        self.scorers.assign()
        self.homes.let_go()
        self.parking.let_go()
        self.dispatcher.dispatch()
        self.migration.call_off_late(now)
        self.draining.move_away()
        self.failover.place_orphans()
        self.repacker.tick(now)
        self.reports.show_progress()
        if self.autoscaling:
            self.autoscaling.tick(now)
        if self.archiving:
            self.archiving.tick(self.state.trainer_step)

    def tell_all_to_leave(self, reason: str) -> None:
        self.state.ending = True
        for member in self.members.by_place.values():
            self.outbox.send(member, Stop(reason))


def make_controller(tables: Tables, hub: Hub, trace: Trace, relays: int) -> Controller:
    """The parts over `tables`, and the loop; lets the others in. `relays`: how many the run starts with."""
    parts = make_protocols(make_flow(tables, relays), hub.address.run_id)
    controller = Controller(**vars(parts), hub=hub, trace=trace, handlers=handlers(parts))
    hub.announce(tables.store.store_id, tables.store.received())
    return controller
