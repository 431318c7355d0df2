"""Replicas that may have outlived the controller before this one, or were taken for dead: what the store says
they own against what they say they hold.

    start over a store -> `awaited`: those whom it names as owners, for a limited time
    Hello              -> one that was known joins anew: nothing is granted to it before its Holds
                          another process in its place: what that place owned goes elsewhere
    Holds              -> what it owns and does not hold goes on elsewhere or starts again
                          what it holds and does not own it drops, unless nobody else has it

Attempt numbers guard trajectories all the same: a report of an old one is refused.
"""

import logging
import time
from collections.abc import Sequence

from laminar_hpc.controller.fleet.members import Member, rollout_silence
from laminar_hpc.controller.fleet.replicas import Replicas
from laminar_hpc.controller.shared import HearsOfLosses, Shared
from laminar_hpc.controller.trajectories.failover import Failover
from laminar_hpc.controller.trajectories.migration import attempt_of
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.line.messages.data import Sample
from laminar_hpc.line.messages.rollouts import Drop, Holds
from laminar_hpc.machine.observability import console
from laminar_hpc.store.store import Store

log = logging.getLogger(__name__)


class Reattachment:
    """`awaited`: replicas that own something by the store and have not been heard of yet. `told`: the parts
    that hear of a lost replica, in this order. `last_seen`: when the last controller was seen to live; 0 if
    there was none, or none that anybody can have outlived."""

    def __init__(
        self,
        shared: Shared,
        store: Store,
        tracker: TrajectoryTracker,
        replicas: Replicas,
        failover: Failover,
        awaited: set[int],
        told: Sequence[HearsOfLosses],
        last_seen: float,
    ) -> None:
        self._shared = shared
        self._store = store
        self._tracker = tracker
        self._replicas = replicas
        self._failover = failover
        self._told = told
        self.awaited = awaited
        self._last_seen = last_seen
        # who has lost a controller looks for this one after 3 s (line/controller_watch.py)
        silence = rollout_silence(shared.config.cluster.heartbeat_timeout_seconds)
        self._until = time.monotonic() + silence
        self._workers = 0  # that have outlived the last controller
        self._over = not last_seen

    # ---- what happens --------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """A worker has said Hello that was no member just now."""
        was_known = member.hello.rejoins or self._store.knows(member.identity)
        self._workers += was_known
        if was_known and self._workers == 1 and self._last_seen:
            self._say_it_is_back()
        if member.hello.role != "rollout":
            return
        replica = member.hello.index
        self._replicas.at(replica).rejoins = was_known
        if replica in self.awaited:
            self.awaited.discard(replica)
            if not was_known:
                self._lost(replica)

    def _lost(self, replica: int) -> None:
        for part in self._told:
            part.replica_lost(replica)

    def _say_it_is_back(self) -> None:
        seconds, step = time.time() - self._last_seen, self._shared.state.trainer_step
        self._shared.metrics.write("controller_back", step=step, seconds=seconds)
        text = f"the controller is back after {seconds:.0f} s, at step {step}: the others join it again"
        self._shared.say(console.line("restart", text))

    def on_holds(self, member: Member, holds: Holds) -> None:
        replica = member.hello.index
        row = self._replicas.at(replica)
        row.rejoins = False
        row.newest_batch = holds.newest_batch
        self._replicas.serves(replica, holds.weight_id)
        held = {sample.trajectory_id: sample.attempt for sample in holds.generating}
        for trajectory_id, attempt in held.items():
            self._tracker.owners.adopt(trajectory_id, attempt, replica)
        owned = {i: sample.attempt for _, i, sample in self._tracker.groups.holders.generating(replica)}
        drop = [Sample(i, attempt) for i, attempt in held.items() if owned.get(i) != attempt]
        coming = {i: attempt + 1 for i, attempt in filter(None, map(attempt_of, holds.moves))}
        gone = [(i, a) for i, a in owned.items() if held.get(i) != a and coming.get(i) != a]
        if drop:
            self._shared.outbox.send(member, Drop(drop))
        self._failover.not_held(gone)
        self._tracker.owners.scores(replica, holds.scoring)
        fields = {"held": len(held) - len(drop), "dropped": len(drop), "regranted": len(gone)}
        self._shared.metrics.write("reattached", replica=replica, scoring=len(holds.scoring), **fields)
        log.info("replica %d has joined anew: %s", replica, fields)

    def tick(self, now: float) -> bool:
        """Whether the time for workers of the last controller is over, and some have come; once."""
        if self._over or now < self._until:
            return False
        self._over = True
        for replica in sorted(self.awaited):
            text = f"replica {replica} has not come back: what it had in hand goes to others"
            log.warning(text)
            self._shared.say(console.line("warning", text))
            self._lost(replica)
        self.awaited.clear()
        return self._workers > 0
