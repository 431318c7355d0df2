"""What a controller takes over from the one before it, over the store of a run under way.

Continuation: what a controller that starts over the store of a run under way takes up from the one before,
beside the trajectories: how far trainers and evaluations are, whether the run ends, and the batch that a
trainer may ask for again. One row of the table `meta`, written in the turn that changes it.

Trainers that outlived their controller go on from there; trainers that start say Restored, and with it
controller/training.py goes back. Only with roles apart: else everything starts anew.

Reattachment: replicas that may have outlived the controller before this one, or were taken for dead: what the
store says they own against what they say they hold.

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

import msgspec

from laminar_hpc.controller.fleet.members import Member, rollout_silence
from laminar_hpc.controller.shared import HearsOfLosses, RunState
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.controller.trajectories.failover import Failover
from laminar_hpc.controller.trajectories.migration import attempt_of
from laminar_hpc.line.messages.data import Sample
from laminar_hpc.line.messages.rollouts import Drop, Holds
from laminar_hpc.machine.observability import console
from laminar_hpc.store.store import Store

_KEY = "under_way"


class _Batch(msgspec.Struct):
    """What was sent for a TakeBatch."""

    step: int
    part: int
    groups: list[int]


class _UnderWay(msgspec.Struct, omit_defaults=True, rename={"trainer_generation": "gang"}):
    trainer_generation: str
    trainer_step: int
    steps_done: int = 0
    trainer_done: bool = False
    stopping: str = ""
    failure: str = ""
    evaluations: list[tuple[str, str, int]] = []
    batch: _Batch | None = None
    begun: list[tuple[str, int, int, float]] = []  # of the evaluations: key, weight id, step, since when


class Continuation:
    """`recall` once at the start, then `note` in each turn before its commit, `over` when all have left."""

    def __init__(self, store: Store, state: RunState, evaluations: Evaluations | None) -> None:
        self._store = store
        self._state = state
        self._evaluations = evaluations
        self._batch: _Batch | None = None
        self._ends = False  # the trainers were done, or told to stop, when this controller started
        self._written = store.get_text(_KEY)
        self._noted: _UnderWay | None = None  # what was written last, here

    def recall(self, shares: int) -> None:
        """Sets `state` and `evaluations` to what the store knows, if trainers had said where they start.
        `shares`: into how many an evaluation is split."""
        if not self._written:
            return
        known, state = msgspec.json.decode(self._written, type=_UnderWay), self._state
        state.trainer_generation = known.trainer_generation
        state.trainer_step = known.trainer_step
        state.steps_done = known.steps_done
        state.groups_taken = len(self._store.rows.consumed_groups(known.trainer_step))
        state.trainer_done = known.trainer_done
        state.stopping = known.stopping
        state.failure = known.failure
        self._batch = known.batch
        self._ends = known.trainer_done or bool(known.stopping)
        if self._evaluations is not None:
            self._evaluations.first_id = max((i for i, _ in self._store.starts_of_trainers()), default=0)
            for name, label, min_step in known.evaluations:
                self._evaluations.add(label, min_step, shares if label != "step" else 1, name)
            for begun in known.begun:
                self._evaluations.go_on(*begun)

    def finish(self) -> None:
        """The workers that outlived the last controller are here: the run ends if nothing was left to do."""
        state = self._state
        if self._ends and state.trainer_done:
            due = bool(self._evaluations and self._evaluations.queue)
            state.finished = state.finished or bool(state.stopping) or not due

    def note(self) -> None:
        """What has changed goes into the open transaction; also while other trainers are awaited, under the
        name of those that have gone."""
        state, due = self._state, self._evaluations.queue if self._evaluations else []
        trainer_generation = state.trainer_generation or (
            self._noted.trainer_generation if self._noted else ""
        )
        if not trainer_generation:
            return
        now = _UnderWay(
            trainer_generation,
            state.trainer_step,
            state.steps_done,
            state.trainer_done,
            state.stopping,
            state.failure,
            [(e.name, e.label, e.min_step) for e in due],
            self._batch,
            [
                (e.key, e.weight_id, e.weight_step, e.started)
                for e in due
                if e.weight_id is not None and e.weight_step is not None
            ],
        )
        if now == self._noted:
            return
        self._noted = now
        text = msgspec.json.encode(now).decode()
        if text != self._written:
            self._store.put_text(_KEY, text)
            self._written = text

    def other_trainers(self) -> None:
        """Those that the store knows are gone, and with them what the user had asked of them."""
        if self._ends:
            self._ends = False
            self._state.trainer_done = False
            self._state.stopping = ""
            self._state.failure = ""

    def over(self) -> None:
        """The run has ended in order: nothing is under way."""
        self._noted = None
        self._store.put_text(_KEY, "")

    # ---- the newest batch ----------------------------------------------------------------------------------

    def sent(self, step: int, part: int, groups: list[int]) -> None:
        self._batch = _Batch(step, part, groups)

    def sent_before(self, step: int, part: int) -> list[int] | None:
        """The groups that went out for this very request, if it was answered before."""
        batch = self._batch
        if batch is None or (batch.step, batch.part) != (step, part):
            return None
        return batch.groups

    def taken_back(self) -> None:
        """What was sent cannot be trained as it is, or is back in the buffer."""
        self._batch = None


log = logging.getLogger(__name__)


class Reattachment:
    """`awaited`: replicas that own something by the store and have not been heard of yet. `told`: the parts
    that hear of a lost replica, in this order. `last_seen`: when the last controller was seen to live; 0 if
    there was none, or none that anybody can have outlived."""

    def __init__(
        self,
        tables: Tables,
        failover: Failover,
        awaited: set[int],
        told: Sequence[HearsOfLosses],
        last_seen: float,
    ) -> None:
        self._shared = tables
        self._store = tables.store
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._failover = failover
        self._told = told
        self.awaited = awaited
        self._last_seen = last_seen
        # who has lost a controller looks for this one after 3 s (line/controller_watch.py)
        silence = rollout_silence(tables.config.cluster.heartbeat_timeout_seconds)
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
        self._failover.place(gone)
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
