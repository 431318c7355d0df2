"""KV caches that relays keep for trajectories that wait for a replica (line/messages/parking.py): which relay
takes them, who takes them up, and when nobody does any more.

Where a KV cache is stands in its name, which the response so far carries (partial_responses.py); a relay that
is lost takes its caches along, and their trajectories are prefilled again. Owns who has asked for which.
"""

from collections import Counter

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.migration import Migration, attempt_of
from laminar_hpc.line.messages.parking import (
    HandedOn,
    HandOn,
    Parked,
    TakenUp,
    TakeUp,
    Unpark,
    parked_at,
    parked_name,
)

LOST = "its relay is gone"  # why a parked KV cache is not taken up


class Parking:
    """Called by the rollouts' and the relays' messages, when a relay is lost, and at each tick."""

    def __init__(self, tables: Tables, migration: Migration) -> None:
        self._shared = tables
        self._replicas = tables.replicas
        self._pool = tables.pool
        self._migration = migration
        # KV caches move only where responses wait for their own weights, as failover.py has them wait
        self.possible = migration.with_kv and tables.config.relay.parked_gigabytes != 0
        self._begun = Counter[int]()  # by relay
        self._asked: dict[str, int] = {}  # name of what is handed on -> the replica that waits for it

    def relays(self, place: str | None) -> list[int]:
        """Those of a place that may keep what a leaving replica there has, the best first: on machines
        without replicas, which are not taken back with them, then on machines of which no replica leaves;
        each the less often the more it has been asked."""
        if not self.possible:
            return []
        members, leaving = self._shared.members, self._replicas.leaving()
        goes = {m.hello.machine for i in leaving if (m := members.at("rollout", i)) is not None}

        def worth(relay: Member) -> tuple[bool, bool, int, int]:
            machine, index = relay.hello.machine, relay.hello.index
            return machine in goes, bool(members.on(machine, "rollout")), self._begun[index], index

        there = [relay for relay in members.all("relay") if relay.hello.place == place]
        return [relay.hello.index for relay in sorted(there, key=worth)]

    def park(
        self, trajectory_id: int, attempt: int, source: int, relay: int, weight_id: int, now: float
    ) -> None:
        """Begins the move there."""
        self._begun[relay] += 1
        self._migration.park(trajectory_id, attempt, source, relay, weight_id, now)

    def on_parked(self, member: Member, message: Parked) -> None:
        named, relay = attempt_of(message.move_id), member.hello.index
        if named is not None:
            fields = {"trajectory_id": named[0], "relay": relay, "tokens": message.tokens}
            self._shared.metrics.write("parked", **fields, bytes=message.bytes)
            if not message.tokens:
                self._pool.nothing_parked(named[0], parked_name(relay, message.move_id))

    def on_take_up(self, member: Member, message: TakeUp) -> None:
        relay, move_id = parked_at(message.parked)
        members, taker = self._shared.members, member.hello.index
        keeper = members.at("relay", relay)
        if message.parked in self._asked:  # it goes to whoever asked first
            return self._answer(message.parked, taker, 0)
        if not message.address:
            why = "the engine has no room"
        elif keeper is None:
            why = LOST
        elif keeper.hello.place != members.place("rollout", taker):
            why = "its relay is at another place"
        else:
            self._asked[message.parked] = taker
            return self._shared.outbox.send(keeper, HandOn(move_id, message.address))
        self._note(message.parked, taker, 0, 0, why)
        if keeper is not None:
            self._shared.outbox.send(keeper, Unpark(move_id))
        if message.address:
            self._answer(message.parked, taker, 0)
        return None

    def on_handed_on(self, member: Member, message: HandedOn) -> None:
        name = parked_name(member.hello.index, message.move_id)
        replica = self._asked.pop(name, None)
        if replica is None:
            return
        self._note(name, replica, message.tokens, message.bytes, message.reason)
        self._answer(name, replica, message.tokens)

    def _note(self, name: str, replica: int, tokens: int, size: int, reason: str) -> None:
        """For the report."""
        relay, move_id = parked_at(name)
        if (named := attempt_of(move_id)) is not None:
            fields = {"trajectory_id": named[0], "relay": relay, "destination": replica}
            self._shared.metrics.write("taken_up", **fields, tokens=tokens, bytes=size, reason=reason)

    def _answer(self, name: str, replica: int, tokens: int) -> None:
        if (taker := self._shared.members.at("rollout", replica)) is not None:
            self._shared.outbox.send(taker, TakenUp(name, tokens))

    def relay_lost(self, relay: int) -> None:
        """Who waits for what it kept goes on without."""
        self._migration.relay_lost(relay)
        for name in [name for name in self._asked if parked_at(name)[0] == relay]:
            replica = self._asked.pop(name)
            self._note(name, replica, 0, 0, LOST)
            self._answer(name, replica, 0)

    def let_go(self) -> None:
        """What the pool has seen the end of, in this turn."""
        for name in self._pool.take_unparked():
            relay, move_id = parked_at(name)
            if name not in self._asked and (keeper := self._shared.members.at("relay", relay)) is not None:
                self._shared.outbox.send(keeper, Unpark(move_id))
