"""Moves of trajectories: repack's plan and the rescue of a dead replica's work, carried out side by side as
policies/moves.py says.

    tick, publication -> [repack.plan] -> Reserve ... Imported -> tracker.move (one transaction)
        -> MoveCommit to both
    a replica is gone -> what the partial-response pool holds -> [failover.redirect]
        -> the same, without a source; or rescuer.py, or again

Owns the moves and the pool; the controller's loop owns everything else. A side that says its last word again
is answered again.
"""

import itertools
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from laminar_hpc import messages as m
from laminar_hpc.controller.members import Member
from laminar_hpc.controller.partials import PartialPool
from laminar_hpc.controller.rescuer import Rescuer
from laminar_hpc.policies import admission, failover, repack
from laminar_hpc.policies.moves import NOBODY, Action, Move, Phase, room

if TYPE_CHECKING:
    from laminar_hpc.controller.loop import Controller

log = logging.getLogger(__name__)
PHASE_SECONDS = 60.0  # a phase that takes longer is called off; KV caches of some GB move in seconds
KV_SHARE = 0.9  # C_max as a share of the cache: room for growth without preemption
TRIES = 3  # rescues of one trajectory before it starts again: a replica that drains meanwhile refuses
_REMEMBERED = 4096  # moves that are over and may still be asked about


class Migration:
    def __init__(self, controller: "Controller") -> None:
        self.c = controller
        self.pool = PartialPool()
        self.rescuer = Rescuer(controller, self.pool)
        self.moves: dict[str, Move] = {}
        self._over: deque[str] = deque()
        self._of: dict[int, str] = {}  # trajectory -> its move under way
        self._parts: dict[str, m.Partial] = {}
        self._began: dict[str, float] = {}
        self._prefix: dict[str, int] = {}
        self._numbers = itertools.count()
        self._loads: dict[int, m.ReplicaLoad] = {}  # replica -> its newest report
        # replica -> (the report at the last look, KV at the look before)
        self._looked: dict[int, tuple[m.ReplicaLoad, float]] = {}
        self._next_look = 0.0
        self._tries: dict[int, int] = {}  # of rescues, by trajectory
        self.counts = {
            "moved": 0,
            "tokens_moved": 0,
            "prefill_tokens_saved": 0,
            "called_off": 0,
            "rescued": 0,
        }

    # ---- repack --------------------------------------------------------------------------------------------

    def loaded(self, replica: int, load: m.ReplicaLoad) -> None:
        """A replica has said how full it is."""
        self._loads[replica] = load

    def tick(self, now: float) -> None:
        for move in [move for move in self.moves.values() if not move.over and now > move.deadline]:
            self._act(move, move.call_off(f"{move.phase.value} took longer than {PHASE_SECONDS:g} s"))
        if self.c.config.pipeline.repack != "off" and now >= self._next_look:
            self.look(now)

    def look_soon(self) -> None:
        """There are newer weights to be had."""
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Plans and starts moves, unless an emptied replica would find no work."""
        self._next_look = now + self.c.config.pipeline.repack_seconds
        self._looked = {replica: self._compared(replica, load) for replica, load in self._loads.items()}
        loads = self._candidates()
        if len(loads) < 2 or not self._work_ahead():
            return
        begun = time.perf_counter()
        capacity = KV_SHARE * min(load.kv_capacity for load, _ in loads.values())
        measured = [load.batch_max for load, _ in loads.values() if load.batch_max]
        most = self.c.config.pipeline.repack_requests or (min(measured) if measured else 0)
        views = [
            repack.ReplicaLoad(r, load.weight_id, load.kv_tokens, before, load.in_flight)
            for r, (load, before) in loads.items()
        ]
        plan = repack.plan(views, capacity, most)
        seconds = time.perf_counter() - begun
        if not plan:
            return
        owned = self.c.tracker.in_progress()
        moved = 0
        for step in plan:
            load = loads[step.source][0]
            for group, trajectory_id, sample in owned.get(step.source, []):
                if trajectory_id not in self._of:
                    prompt, most = (
                        len(self.c.tracker.prompt_of(group).tokens),
                        self.c.config.sampling.max_response_tokens,
                    )
                    tokens = room(prompt, most, load.kv_tokens, load.in_flight)
                    self.begin(
                        trajectory_id,
                        sample.attempt,
                        step.source,
                        step.destination,
                        load.weight_id,
                        tokens,
                        now,
                    )
                    moved += 1
        self.c.metrics.write(
            "repack",
            replicas=len(views),
            sources=[s.source for s in plan],
            destinations=[s.destination for s in plan],
            trajectories=moved,
            planner_ms=seconds * 1e3,
        )

    def _candidates(self) -> dict[int, tuple[m.ReplicaLoad, float]]:
        """Replicas that generate with nothing waiting, for training (the tracker knows their work), and that
        no move under way concerns.

        Some of a report's requests may have ended since: the tracker's count is the newer one, and never the
        larger."""
        busy = {r for move in self.moves.values() if not move.over for r in (move.source, move.destination)}
        count = self.c.tracker.in_progress_counts()
        return {
            replica: (load, before)
            for replica, (load, before) in self._looked.items()
            if replica not in busy
            and self.c.members.at("rollout", replica) is not None
            and _drains(load)
            and 0 < count.get(replica, 0) <= load.in_flight <= self.c.config.rollout.max_concurrent
            and load.weight_id == self.c.open_weights.get(replica)
        }

    def _compared(self, replica: int, load: m.ReplicaLoad) -> tuple[m.ReplicaLoad, float]:
        """The report, and the KV at the look before: a fall shows between two looks at a replica that drained
        at both. A ping may repeat a report, and a look come before the next one: the same report is no new
        one."""
        earlier, before = self._looked.get(replica, (None, 0.0))
        if earlier == load:
            return load, before
        return load, earlier.kv_tokens if earlier and _drains(
            earlier
        ) and earlier.weight_id == load.weight_id else 0.0

    def _work_ahead(self) -> bool:
        """Whether admission would give a replica on the newest weights something to do."""
        c = self.c
        size, bound = c.config.algorithm.prompts_per_step, c.config.pipeline.max_staleness
        return (
            not c.stopping
            and admission.quota(c.weights.newest[1], c.tracker.counted, size, c.config.steps, bound) > 0
        )

    # ---- a move --------------------------------------------------------------------------------------------

    def begin(
        self,
        trajectory_id: int,
        attempt: int,
        source: int,
        destination: int,
        weight_id: int,
        tokens: int,
        now: float,
    ) -> None:
        """`source`: its owner, or NOBODY; `tokens`: for its KV cache; `now`: monotonic seconds."""
        c, move_id = self.c, f"{trajectory_id}-{attempt}-{next(self._numbers)}"
        move = Move(move_id, trajectory_id, attempt, source, destination, weight_id, now + PHASE_SECONDS)
        self.moves[move_id], self._of[trajectory_id], self._began[move_id] = move, move_id, now
        sampling, kv = c.config.sampling, c.config.pipeline.repack == "kv" and source != NOBODY
        self._send(
            destination,
            m.Reserve(
                move_id,
                trajectory_id,
                c.tracker.bare_group(trajectory_id),
                weight_id,
                c.weights.steps[weight_id],
                tokens,
                kv,
                sampling.temperature,
                sampling.max_response_tokens,
            ),
        )

    def _send(self, replica: int, message: m.Message) -> None:
        self.c.send(self.c.members.at("rollout", replica), message)

    def heard(self, member: Member, message: m.Reserved | m.MoveReady | m.Imported | m.MoveFailed) -> None:
        """A word of one of the two sides, perhaps not its first."""
        replica, move = member.hello.index, self.moves.get(message.move_id)
        if move is None or replica not in (move.source, move.destination):
            self._send(replica, m.MoveAbort(message.move_id, "it is not known here"))
        elif isinstance(message, m.Reserved):
            self._act(move, move.reserved(message.address), replica)
        elif isinstance(message, m.MoveReady):
            if move.phase is Phase.DETACH:
                self._parts[move.move_id] = message.partial
                self.pool.put(move.trajectory_id, move.attempt, message.partial)
            self._act(move, move.ready(), replica)
        elif isinstance(message, m.Imported):
            self._prefix[move.move_id] = message.prefix_tokens
            self._act(move, move.imported(), replica)
        else:
            if move.phase is Phase.RESERVE and move.source == NOBODY:
                # its report was out of date: nothing more for it before the next one
                self._loads.pop(replica, None)
            self._act(move, move.call_off(message.reason), replica)

    def _act(self, move: Move, actions: list[Action], asker: int = NOBODY) -> None:
        now, orphan = time.monotonic(), None
        for action in actions:
            move.deadline = now + PHASE_SECONDS
            if action is Action.ORDER:
                self._send(
                    move.source, m.MoveOrder(move.move_id, move.trajectory_id, move.attempt, move.address)
                )
            elif action is Action.IMPORT:
                self._send(move.destination, m.Import(move.move_id, self._parts[move.move_id]))
            elif action is Action.CHANGE_OWNER:
                self._change_owner(move, now)
            elif action is Action.CALL_OFF:
                for replica in (move.source, move.destination):
                    self._send(replica, m.MoveAbort(move.move_id, move.reason))
                self.counts["called_off"] += 1
                self.c.metrics.write(
                    "move_off", trajectory_id=move.trajectory_id, source=move.source, reason=move.reason
                )
            elif action is Action.ORPHAN:
                orphan = (move.trajectory_id, move.attempt)
            elif action is Action.ANSWER:
                committed = move.phase is Phase.COMMITTED
                self._send(
                    asker,
                    m.MoveCommit(move.move_id, move.attempt + 1)
                    if committed
                    else m.MoveAbort(move.move_id, move.reason),
                )
        if move.over and self._of.get(move.trajectory_id) == move.move_id:
            self._forget(move)
        if orphan is not None:
            self._redirect([orphan])

    def _change_owner(self, move: Move, now: float) -> None:
        """In the transaction of this turn; the messages leave after its commit."""
        part, prefix = self._parts[move.move_id], self._prefix[move.move_id]
        if not self.c.tracker.move(move.trajectory_id, move.attempt, move.destination, move.weight_id):
            move.phase, move.reason = Phase.ABORTED, "its trajectory no longer counts"
            self._act(move, [Action.CALL_OFF])
            return
        arrived = m.Partial(part.tokens, part.logprobs, part.spans, part.time_started, part.moves + 1)
        self.pool.put(move.trajectory_id, move.attempt + 1, arrived)
        for replica in (move.source, move.destination):
            self._send(replica, m.MoveCommit(move.move_id, move.attempt + 1))
        tokens = len(part.tokens)
        self.counts["moved" if move.source != NOBODY else "rescued"] += 1
        self.counts["tokens_moved"] += tokens
        self.counts["prefill_tokens_saved"] += prefix
        self.c.metrics.write(
            "move",
            trajectory_id=move.trajectory_id,
            source=move.source,
            destination=move.destination,
            weight_id=move.weight_id,
            tokens=tokens,
            prefix_tokens=prefix,
            seconds=now - self._began[move.move_id],
        )

    def _forget(self, move: Move) -> None:
        """All but the outcome, and in time that as well."""
        del self._of[move.trajectory_id]
        for known in (self._parts, self._began, self._prefix):
            known.pop(move.move_id, None)
        self._over.append(move.move_id)
        while len(self._over) > _REMEMBERED:
            self.moves.pop(self._over.popleft(), None)

    # ---- ends ----------------------------------------------------------------------------------------------

    def ended(self, trajectory_id: int) -> int:
        """It has its last token, or was lost at its owner. Returns how many tokens of it were known here."""
        tokens = self.pool.drop(trajectory_id)
        self._tries.pop(trajectory_id, None)
        self.rescuer.ended(trajectory_id)
        if trajectory_id in self._of:
            move = self.moves[self._of[trajectory_id]]
            self._act(move, move.call_off("its trajectory has ended"))
        return tokens

    def replica_gone(self, replica: int) -> int:
        """Its moves end or go on without it; its work goes on elsewhere on the same weights or starts again.
        Returns how many it had."""
        self._loads.pop(replica, None)
        self.rescuer.replica_gone(replica)
        for move in [move for move in self.moves.values() if not move.over]:
            self._act(move, move.gone(replica))
        left = self.c.tracker.in_progress(generated=True).get(replica, [])
        for _, trajectory_id, _ in left:
            if trajectory_id in self._of:  # on its way without its source
                self.c.tracker.hold(trajectory_id)
        self._redirect([(i, sample.attempt) for _, i, sample in left if i not in self._of])
        return len(left)

    def not_loaded(self, member: Member, message: m.NotLoaded) -> None:
        self._redirect(self.rescuer.not_loaded(member, message))

    def orphan(self, trajectory_id: int, part: m.Partial) -> failover.Orphan:
        prompt, response = len(self.c.tracker.bare_group(trajectory_id).prompt_tokens), len(part.tokens)
        return failover.Orphan(trajectory_id, part.spans[0].weight_id, prompt + response, response)

    def _redirect(self, orphans: list[tuple[int, int]]) -> None:
        """(trajectory, attempt) without an owner: to replicas on the same weights from what the pool holds,
        now or when one without work has loaded them, else back to the prompt."""
        known = {
            i: part for i, attempt in orphans if (part := self.pool.get(i, attempt)) and len(part.spans) == 1
        }
        wanted = {i: self.orphan(i, part) for i, part in known.items() if self._tries.get(i, 0) < TRIES}
        placed = failover.redirect(list(wanted.values()), self._rooms())
        for trajectory_id, attempt in orphans:
            if trajectory_id not in wanted or (
                trajectory_id not in placed and self.c.config.pipeline.refresh != "drained"
            ):
                self.begin_anew(trajectory_id, attempt)
                continue
            self._tries[trajectory_id] = self._tries.get(trajectory_id, 0) + 1
            if trajectory_id not in placed:
                self.rescuer.wait(trajectory_id, attempt)
                continue
            self.c.tracker.hold(trajectory_id)
            part = known[trajectory_id]
            destination, weight_id = placed[trajectory_id], wanted[trajectory_id].weight_id
            self.begin(
                trajectory_id, attempt, NOBODY, destination, weight_id, len(part.tokens), time.monotonic()
            )
            self._parts[self._of[trajectory_id]] = part

    def begin_anew(self, trajectory_id: int, attempt: int) -> None:
        """From its prompt; what is known of it is thrown away, and counted."""
        self._tries.pop(trajectory_id, None)
        self.c.tracker.discard(trajectory_id, attempt, self.pool.drop(trajectory_id))

    def _rooms(self) -> list[failover.Room]:
        """Replicas that generate: they can take more of their weights. Their last report may be older than
        what they serve by now."""
        return [
            failover.Room(replica, load.weight_id, float(load.kv_capacity - load.kv_tokens))
            for replica, load in self._loads.items()
            if load.phase == "draining"
            and load.weight_id == self.c.open_weights.get(replica)
            and replica not in self.c.waiting
        ]


def _drains(load: m.ReplicaLoad) -> bool:
    """It generates, and nothing waits in its engine."""
    return load.phase == "draining" and load.queued == 0
