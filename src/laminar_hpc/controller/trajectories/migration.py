"""Moves of trajectories between replicas, carried out side by side as policies/moves.py says.

    `begin`: Reserve -> Reserved -> MoveOrder -> MoveReady -> Import -> Imported
        -> owners.move (one transaction) -> MoveCommit to both

    `park`: Park -> Reserved -> MoveOrder -> MoveReady -> Keep to the relay, MoveCommit to the source

Begun by controller/trajectories/repacker.py, controller/fleet/draining.py and, without a source, by
controller/trajectories/failover.py. Owns the moves. A side that repeats its last message is answered again.
A trajectory that has parked, or whose move is called off when its owner is dead, goes into `orphans`, from
which the rescuer takes it in the same turn.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec

from laminar_hpc.config.kv_moves import kv_moves
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.tables import Tables
from laminar_hpc.line.messages.data import Message, Partial
from laminar_hpc.line.messages.moves import (
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
from laminar_hpc.line.messages.parking import Keep, Park, Unpark, parked_name
from laminar_hpc.policies.moves import Action, Move, MovePhase
from laminar_hpc.policies.repack import MoveCosts

PHASE_SECONDS = 60.0  # a phase that takes longer is called off; KV caches of some GB move in seconds
_REMEMBERED = 4096  # moves that are over and may still be asked about


@dataclass
class _MoveProgress:
    """A move, when it began (monotonic seconds), and what its sides have said."""

    move: Move
    began: float
    partial: Partial | None
    siblings: bytes = b""
    prefix_tokens: int = 0


class Migration:
    """`steps`: the trainer step of each weight id. `first_number`: of moves, above earlier controllers'."""

    def __init__(self, tables: Tables, steps: dict[int, int], first_number: int) -> None:
        self._shared = tables
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._pool = tables.pool
        self._steps = steps
        self.with_kv = kv_moves(tables.config)
        config = tables.config
        self.costs = MoveCosts(config.pipeline.repack != "auto", config.emulation.time_scale)
        self._moves: dict[str, _MoveProgress] = {}  # under way, and the last of those that are over
        self._over: deque[str] = deque()
        self.moving: dict[int, str] = {}  # trajectory -> its move under way
        self._late_at: list[tuple[float, str]] = []  # a heap: when a move under way is late, or later
        self._numbers = itertools.count(first_number)
        self.orphans: list[tuple[int, int]] = []  # (trajectory, attempt)

    def busy_replicas(self) -> set[int | None]:
        """Sources and destinations of the moves under way."""
        moves = [self._moves[move_id].move for move_id in self.moving.values()]
        return {replica for move in moves for replica in (move.source, move.destination)}

    def destination(self, trajectory_id: int) -> int | None:
        """Returns where the trajectory's present move goes."""
        move_id = self.moving.get(trajectory_id)
        return None if move_id is None else self._moves[move_id].move.destination

    # ---- begin and end -------------------------------------------------------------------------------------

    def begin(
        self,
        trajectory_id: int,
        attempt: int,
        source: int | None,
        destination: int,
        weight_id: int,
        tokens: int,
        now: float,
        partial: Partial | None = None,
    ) -> None:
        """`source`: the owner, None when it is dead; then `partial` is the response so far. `tokens`: room
        for the KV cache at the destination, 0 = it has none yet; none crosses the link between two places.
        `now`: monotonic seconds."""
        move = self._new(trajectory_id, attempt, source, destination, weight_id, now, partial)
        group, step = self._tracker.groups.bare(trajectory_id), self._steps[weight_id]
        config = self._shared.config
        places = {self._shared.members.place("rollout", replica) for replica in (source, destination)}
        kv = self.with_kv and source is not None and tokens > 0 and len(places) == 1
        sampling = (config.sampling.temperature, config.sampling.max_response_tokens)
        reserve = Reserve(move.move_id, trajectory_id, group, weight_id, step, tokens, kv, *sampling)
        self._send(destination, reserve)

    def park(
        self, trajectory_id: int, attempt: int, source: int, relay: int, weight_id: int, now: float
    ) -> None:
        """The KV cache goes to `relay`; then the trajectory waits for a replica."""
        move = self._new(trajectory_id, attempt, source, None, weight_id, now, None)
        move.relay = relay
        self._tell_relay(move, Park(move.move_id))

    def _new(
        self,
        trajectory_id: int,
        attempt: int,
        source: int | None,
        destination: int | None,
        weight_id: int,
        now: float,
        partial: Partial | None,
    ) -> Move:
        move_id, deadline = f"{trajectory_id}-{attempt}-{next(self._numbers)}", now + PHASE_SECONDS
        move = Move(move_id, trajectory_id, attempt, source, destination, weight_id, deadline)
        self._moves[move_id] = _MoveProgress(move, now, partial)
        self.moving[trajectory_id] = move_id
        heappush(self._late_at, (deadline, move_id))
        return move

    def _tell_relay(self, move: Move, message: Message) -> None:
        if move.relay is not None and (member := self._shared.members.at("relay", move.relay)) is not None:
            self._shared.outbox.send(member, message)

    def _send(self, replica: int | None, message: Message) -> None:
        if replica is not None:
            self._shared.outbox.send(self._shared.members.at("rollout", replica), message)

    def call_off_late(self, now: float) -> None:
        while self._late_at and self._late_at[0][0] < now:
            _, move_id = heappop(self._late_at)
            progress = self._moves.get(move_id)
            if progress is None or progress.move.over:
                continue
            move = progress.move
            if now > move.deadline:
                reason = f"{move.phase.value} took longer than {PHASE_SECONDS:g} s"
                if move.source is not None:
                    self.costs.add(PHASE_SECONDS)
                self._act(progress, move.call_off(reason))
            else:  # it has come to its next phase meanwhile
                heappush(self._late_at, (move.deadline, move_id))

    def trajectory_ended(self, trajectory_id: int) -> None:
        """It has its last token, or was lost at its owner."""
        if move_id := self.moving.get(trajectory_id):
            progress = self._moves[move_id]
            self._act(progress, progress.move.call_off("its trajectory has ended"))

    def source_gives_up(self, trajectory_id: int, source: int) -> None:
        """Acts as if the source were lost, for this trajectory only."""
        if move_id := self.moving.get(trajectory_id):
            progress = self._moves[move_id]
            if progress.move.source == source:
                self._act(progress, progress.move.replica_lost(source))

    def replica_lost(self, replica: int) -> None:
        """Ends the lost replica's moves, or lets them go on without it."""
        for progress in [self._moves[move_id] for move_id in self.moving.values()]:
            self._act(progress, progress.move.replica_lost(replica))

    def relay_lost(self, relay: int) -> None:
        """What was to park there goes on at its source."""
        for progress in [self._moves[move_id] for move_id in self.moving.values()]:
            if progress.move.relay == relay:
                self._act(progress, progress.move.call_off("its relay is gone"))

    # ---- what the two sides say, perhaps not for the first time --------------------------------------------

    def _progress(self, member: Member, move_id: str, said: type[Message]) -> _MoveProgress | None:
        """Of a move that concerns this replica or relay; else a replica is told how it ended, and a relay
        forgets it."""
        progress, index, parks = self._moves.get(move_id), member.hello.index, member.hello.role == "relay"
        move = progress.move if progress is not None else None
        sides = () if move is None else (move.relay,) if parks else (move.source, move.destination)
        if index in sides:
            return progress
        answer = Unpark(move_id) if parks else self._recorded(index, move_id, said)
        self._shared.outbox.send(member, answer)
        return None

    def _recorded(self, replica: int, move_id: str, said: type[Message]) -> MoveCommit | MoveAbort:
        """How a move ended that an earlier controller had begun: the owner of its trajectory tells."""
        named = attempt_of(move_id)
        if named is None:
            return MoveAbort(move_id, "it is not known here")
        trajectory_id, attempt = named
        owner, present = self._tracker.groups.owner(trajectory_id)
        has_come = said is Imported and owner == replica and present == attempt + 1
        has_gone = said is MoveReady and present > attempt
        if has_come or has_gone:
            return MoveCommit(move_id, attempt + 1)
        return MoveAbort(move_id, "it is not known here")

    def on_reserved(self, member: Member, message: Reserved) -> None:
        if progress := self._progress(member, message.move_id, Reserved):
            self._act(progress, progress.move.reserved(message.address), member.hello.index)

    def on_move_ready(self, member: Member, message: MoveReady) -> None:
        if progress := self._progress(member, message.move_id, MoveReady):
            move = progress.move
            if move.phase is MovePhase.DETACH:
                progress.partial = message.partial
                progress.siblings = message.siblings
                self._pool.put(move.trajectory_id, move.attempt, message.partial)
            self._act(progress, move.ready(), member.hello.index)

    def on_imported(self, member: Member, message: Imported) -> None:
        if progress := self._progress(member, message.move_id, Imported):
            progress.prefix_tokens = message.prefix_tokens
            self._act(progress, progress.move.imported(), member.hello.index)

    def on_move_failed(self, member: Member, message: MoveFailed) -> None:
        if progress := self._progress(member, message.move_id, MoveFailed):
            move = progress.move
            if move.phase is MovePhase.RESERVE and move.source is None:
                self._replicas.at(member.hello.index).report_is_outdated = True
            elif move.phase is MovePhase.RESERVE and move.relay is None:
                self.costs.add(PHASE_SECONDS)  # in vain: what never works is to cost too much
            self._act(progress, move.call_off(message.reason))

    # ---- what to do about it -------------------------------------------------------------------------------

    def _act(self, progress: _MoveProgress, actions: list[Action], asker: int | None = None) -> None:
        """`asker`: the replica whose message led to these actions."""
        now, move = time.monotonic(), progress.move
        for action in actions:
            move.deadline = now + PHASE_SECONDS
            if action is Action.ORDER:
                order = MoveOrder(move.move_id, move.trajectory_id, move.attempt, move.address)
                self._send(move.source, order)
            elif action is Action.IMPORT:
                assert progress.partial is not None
                self._send(move.destination, Import(move.move_id, progress.partial, progress.siblings))
            elif action is Action.CHANGE_OWNER:
                self._change_owner(progress, now)
            elif action is Action.CALL_OFF:
                self._call_off(move)
            elif action is Action.PARK:
                self._parked(progress)
            elif action is Action.ORPHAN:
                self.orphans.append((move.trajectory_id, move.attempt))
            elif action is Action.ANSWER:
                self._send(asker, _outcome(move))
        if move.over and self.moving.get(move.trajectory_id) == move.move_id:
            self._forget(progress)

    def _parked(self, progress: _MoveProgress) -> None:
        """The source lets go of it; it waits for a replica, which asks the relay for its KV cache."""
        move, partial = progress.move, progress.partial
        assert partial is not None and move.relay is not None
        named = msgspec.structs.replace(partial, parked=parked_name(move.relay, move.move_id))
        self._pool.put(move.trajectory_id, move.attempt, named)
        self._tell_relay(move, Keep(move.move_id))
        self._send(move.source, _outcome(move))
        self.orphans.append((move.trajectory_id, move.attempt))

    def _call_off(self, move: Move) -> None:
        for replica in (move.source, move.destination):
            self._send(replica, MoveAbort(move.move_id, move.reason))
        self._tell_relay(move, Unpark(move.move_id))
        self._shared.metrics.write(
            "move_off",
            trajectory_id=move.trajectory_id,
            source=move.source,
            destination=move.destination,
            reason=move.reason,
        )

    def _change_owner(self, progress: _MoveProgress, now: float) -> None:
        """In the transaction of this turn; the messages leave after its commit."""
        move, partial = progress.move, progress.partial
        assert partial is not None and move.destination is not None
        if not self._tracker.owners.move(move.trajectory_id, move.attempt, move.destination, move.weight_id):
            move.phase = MovePhase.ABORTED
            move.reason = "its trajectory no longer counts"
            self._call_off(move)
            return
        self._pool.put(move.trajectory_id, move.attempt + 1, moved(partial))
        if move.source is not None and partial.count:
            self.costs.add(now - progress.began)
        for replica in (move.source, move.destination):
            self._send(replica, _outcome(move))
        self._shared.metrics.write(
            "move",
            trajectory_id=move.trajectory_id,
            source=move.source,
            destination=move.destination,
            weight_id=move.weight_id,
            tokens=partial.count,
            waiting=bool(partial.awaits),
            prefix_tokens=progress.prefix_tokens,
            seconds=now - progress.began,
        )

    def _forget(self, progress: _MoveProgress) -> None:
        """Keeps the outcome only, and that only of the newest moves."""
        move = progress.move
        del self.moving[move.trajectory_id]
        progress.partial = None
        progress.siblings = b""
        self._over.append(move.move_id)
        while len(self._over) > _REMEMBERED:
            self._moves.pop(self._over.popleft(), None)


def moved(partial: Partial) -> Partial:
    """A response so far, at its new owner."""
    return msgspec.structs.replace(partial, moves=partial.moves + 1)


def attempt_of(move_id: str) -> tuple[int, int] | None:
    """(trajectory, attempt) that the move takes along; None for what is no move."""
    parts = move_id.split("-")
    if len(move_id) < 64 and len(parts) == 3 and all(part.isascii() and part.isdecimal() for part in parts):
        return int(parts[0]), int(parts[1])
    return None


def _outcome(move: Move) -> MoveCommit | MoveAbort:
    if move.phase is MovePhase.COMMITTED:
        return MoveCommit(move.move_id, move.attempt + 1)
    return MoveAbort(move.move_id, move.reason)
