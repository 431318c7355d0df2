"""Trajectories whose replica is dead: they go on elsewhere on the same weights, from what the
partial-response pool holds, or start again from their prompts.

    replica lost -> [failover.redirect] -> a move without a source (controller/trajectories/migration.py)
                 -> nobody is known to have room on these weights: they wait
    Ping with a report of such room -> a move without a source
    `next_rescue`, called by the dispatcher -> [failover.plan_reloads] -> Grant with parts
        -> WeightsOpened: they go on there
        -> NotLoaded: the next replica, or back to the prompt

Owns those that wait and those whose weights are being loaded; the latter belong to their new replica from its
grant on, as in any grant.
"""

import logging
import time
from dataclasses import dataclass

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.fleet.replicas import Replica
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.migration import Migration, moved
from laminar_hpc.controller.weights.weight_ids import Weights
from laminar_hpc.line.messages.data import Partial, PromptGroup
from laminar_hpc.line.messages.rollouts import EngineHung, NotLoaded
from laminar_hpc.policies import failover
from laminar_hpc.policies.waiting_orphans import WaitingOrphans

log = logging.getLogger(__name__)
TRIES = 3  # rescues of one trajectory before it starts again: a replica that drains meanwhile refuses

Attempt = tuple[int, int]  # (trajectory, attempt)


@dataclass
class Rescue:
    """What `replica` is to go on with; `parts`: the responses so far, by trajectory."""

    batch_id: int
    replica: int
    weight_id: int
    machine: str
    groups: list[PromptGroup]
    parts: dict[int, Partial]
    # trajectory -> response tokens so far, seconds for which it had waited
    resumed: dict[int, tuple[int, float]]

    def attempts(self) -> list[Attempt]:
        return [(s.trajectory_id, s.attempt) for group in self.groups for s in group.samples]


class Failover:
    """Called when a replica is lost, by the dispatcher, and after each message and tick."""

    def __init__(self, tables: Tables, weights: Weights, migration: Migration) -> None:
        self._shared = tables
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._weights = weights
        self._pool = tables.pool
        self._migration = migration
        self._waiting = WaitingOrphans()
        self._loading: dict[int, Rescue] = {}  # by replica
        self._tries: dict[int, int] = {}  # by trajectory

    # ---- what happens --------------------------------------------------------------------------------------

    def trajectory_ended(self, trajectory_id: int) -> int:
        """It has its last token, or was lost at its owner, which may have been taken for dead. Returns how
        many tokens of it were known here."""
        tokens = self._pool.drop(trajectory_id)
        self._tries.pop(trajectory_id, None)
        self._waiting.discard(trajectory_id)
        self._migration.trajectory_ended(trajectory_id)
        return tokens

    def replica_lost(self, replica: int) -> None:
        """The responses that it generated go on elsewhere or start again; complete ones are not included."""
        self._loading.pop(replica, None)
        self._migration.replica_lost(replica)
        self.place_orphans()
        left = self._tracker.groups.holders.generating(replica)
        moving = self._migration.moving
        for _, trajectory_id, _ in left:
            if trajectory_id in moving:  # its move goes on without its source
                self._tracker.owners.hold(trajectory_id)
        self.place([(i, sample.attempt) for _, i, sample in left if i not in moving])
        if left:
            fields = {"trajectories": len(left), "reason": "replica gone"}
            self._shared.metrics.write("regranted", replica=replica, **fields)

    def given_back(self, replica: int, trajectory_id: int, attempt: int, partial: Partial) -> None:
        """Its replica cannot go on with it: it goes on elsewhere from `partial`, or from what is known here
        if that is more. What a move has brought to its destination goes on there."""
        known = self._pool.get(trajectory_id, attempt)
        if partial.count >= (known.count if known else 0):
            self._pool.put(trajectory_id, attempt, partial)
        self._migration.source_gives_up(trajectory_id, replica)
        if trajectory_id in self._migration.moving:
            self._tracker.owners.hold(trajectory_id)
        else:
            self.place([(trajectory_id, attempt)])

    def on_engine_hung(self, member: Member, hung: EngineHung) -> None:
        """Nothing goes there before it has opened weights again."""
        self._replicas.at(member.hello.index).report_is_outdated = True
        self._replicas.serves(member.hello.index, None)
        self._shared.say(
            f"{member.name}: {hung.reason}: it is started again; what it generated goes on elsewhere"
        )
        self._shared.metrics.write("engine_hung", replica=member.hello.index, reason=hung.reason)

    def opened(self, replica: int, weight_id: int) -> None:
        rescue = self._loading.get(replica)
        if rescue is not None and rescue.weight_id == weight_id:
            self._record(self._loading.pop(replica), loaded=True)

    def on_not_loaded(self, member: Member, message: NotLoaded) -> None:
        """All that it generates is of that batch, also where an earlier controller has granted it."""
        replica, reason = member.hello.index, message.reason
        if message.batch_id != self._replicas.at(replica).newest_batch:
            return
        if rescue := self._loading.pop(replica, None):
            self._weights.forget_slot(rescue.machine, rescue.weight_id)
        orphans = [(i, sample.attempt) for _, i, sample in self._tracker.groups.holders.generating(replica)]
        log.warning("%s could not go on with %d trajectories: %s", member.name, len(orphans), reason)
        for trajectory_id, _ in orphans:
            self._migration.source_gives_up(trajectory_id, replica)
            self._tracker.owners.hold(trajectory_id)
            fields = {"trajectory_id": trajectory_id, "source": None, "destination": replica}
            self._shared.metrics.write("move_off", **fields, reason=reason)
        self.place(orphans)

    def place_orphans(self) -> None:
        """Those whose moves were called off; the loop calls this after each message and each tick."""
        orphans = self._migration.orphans
        self._migration.orphans = []
        for orphan in orphans:
            self.place([orphan])

    # ---- to replicas that generate -------------------------------------------------------------------------

    def place(self, orphans: list[Attempt]) -> None:
        """To replicas on the same weights from what the pool holds, now or when one without work has loaded
        them, else back to the prompt. With refresh=interrupt a response may go on with newer weights."""
        refresh, rooms = self._shared.config.pipeline.refresh, self.rooms()
        newest = max((room.weight_id for room in rooms), default=None) if refresh == "interrupt" else None
        known = {i: part for i, attempt in orphans if (part := self._known(i, attempt))}
        wanted = {
            i: self._view(i, part, newest) for i, part in known.items() if self._tries.get(i, 0) < TRIES
        }
        placed = failover.redirect(list(wanted.values()), rooms)
        for trajectory_id, attempt in orphans:
            self._waiting.discard(trajectory_id)
            destination = placed.get(trajectory_id)
            waits = refresh in ("drained", "versions")
            if trajectory_id not in wanted or (destination is None and not waits):
                self._start_again(trajectory_id, attempt)
                continue
            self._tries[trajectory_id] = self._tries.get(trajectory_id, 0) + 1
            self._tracker.owners.hold(trajectory_id)
            if destination is None:
                self._waiting.put(wanted[trajectory_id], attempt, time.monotonic())
            else:
                self._begin(wanted[trajectory_id], attempt, destination, known[trajectory_id])

    def _known(self, trajectory_id: int, attempt: int) -> Partial | None:
        """From what it can go on elsewhere: tokens of one policy, with refresh=interrupt of any."""
        part = self._pool.get(trajectory_id, attempt)
        policies = len(part.weight_ids) if part else 0
        several = policies > 1 and self._shared.config.pipeline.refresh == "interrupt"
        return part if policies == 1 or several else None

    def _begin(self, orphan: failover.Orphan, attempt: int, destination: int, part: Partial) -> None:
        """A move without a source."""
        where = (None, destination, orphan.weight_id, part.count)
        self._migration.begin(orphan.trajectory_id, attempt, *where, time.monotonic(), part)

    def reported(self, replica: int) -> None:
        """What waits goes on there if the newest report has room for it; a report is looked at once, as what
        is placed by it is not in it."""
        if not self._waiting:
            return
        taken = 0
        for room in self._rooms_of(replica, self._replicas.at(replica)):
            left = failover.Room(replica, room.weight_id, room.kv_tokens_free - taken)
            for trajectory_id in self._waiting.fitting(left):
                attempt, _ = self._waiting.pop(trajectory_id)
                if part := self._known(trajectory_id, attempt):
                    view = self._view(trajectory_id, part)
                    taken += view.tokens
                    self._begin(view, attempt, replica, part)
                else:
                    self._start_again(trajectory_id, attempt)

    def rooms(self) -> list[failover.Room]:
        """Replicas that generate: they can take more of their weights. Their last report may be older than
        what they serve by now."""
        rows = self._replicas.rows().items()
        return [room for replica, row in rows for room in self._rooms_of(replica, row)]

    def _rooms_of(self, replica: int, row: Replica) -> list[failover.Room]:
        """One for each id that it generates with."""
        report = row.current_report
        if report is None or report.phase != "draining" or row.leaving:
            return []
        weight_ids = report.held
        if not weight_ids:
            weight_id, waits = report.weight_id, replica in self._replicas.waiting
            if waits or weight_id is None or weight_id != row.weight_id:
                return []
            weight_ids = [weight_id]
        free = float(report.kv_capacity - report.held_tokens)
        return [failover.Room(replica, weight_id, free) for weight_id in weight_ids]

    def _view(self, trajectory_id: int, part: Partial, newest: int | None = None) -> failover.Orphan:
        """To go on with its own weights, or with those of the id `newest` if they are newer."""
        prompt, response = len(self._tracker.groups.bare(trajectory_id).prompt_tokens), part.count
        own = part.spans[-1].weight_id
        weight_id = own if newest is None else max(newest, own)
        return failover.Orphan(trajectory_id, weight_id, prompt + response, response)

    def _start_again(self, trajectory_id: int, attempt: int) -> None:
        """From its prompt; what is known of it is thrown away, and counted."""
        self._tries.pop(trajectory_id, None)
        self._tracker.owners.discard(trajectory_id, attempt, self._pool.drop(trajectory_id))

    # ---- to replicas without work --------------------------------------------------------------------------

    def next_rescue(self, batch_id: int) -> Rescue | None:
        """What a replica without work goes on with, as batch `batch_id`; None when there is nothing, or
        nobody. Called until it returns None: each rescue leaves less that can be loaded. What was forgotten
        while it waited, as its environment is lost, starts again."""
        idle, weight_ids = self._idle() if self._waiting else [], self._waiting.weight_ids
        if not any(each.weight_id is not None or weight_ids & each.loadable for each in idle):
            return None  # nobody could load any of it, or begin it anew
        known = {i: self._known(i, attempt) for i, attempt in self._waiting}
        orphans = {i: self._view(i, part) for i, part in known.items() if part}
        reloads, again = failover.plan_reloads(orphans.values(), idle)
        if reloads:
            return self._regrant(reloads[0], batch_id)
        held = self._replicas.held()  # by others, which will have room
        settled = [i for i in again if orphans[i].weight_id not in held]
        for trajectory_id in [*settled, *(i for i, part in known.items() if part is None)]:
            attempt, _ = self._waiting.pop(trajectory_id)
            self._start_again(trajectory_id, attempt)
        return None

    def _idle(self) -> list[failover.Idle]:
        """Replicas that ask for work, but for those that will pull first, and those that are starting and
        have been given nothing yet."""
        without_work, idle = self._replicas.without_work(), list[failover.Idle]()
        if not without_work:
            return idle
        rows = self._replicas.rows()
        speeds = [row.report.tokens_per_second for row in rows.values() if row.report is not None]
        tokens_per_reload = self._replicas.pull_seconds * max(speeds, default=0.0)
        for replica in without_work:
            row, asks_on = rows[replica], self._replicas.waiting.weight_id(replica)
            member = self._shared.members.at("rollout", replica)
            if member is None or row.rejoins or row.leaving:
                continue
            machine = member.hello.machine
            if asks_on is not None and self._weights.is_newest_on(machine, asks_on):
                serves: int | None = asks_on
            elif row.report is not None and row.report.phase == "unverified" and row.newest_batch is None:
                serves = None
            else:
                continue
            loading = {rescue.weight_id for rescue in self._loading.values() if rescue.machine == machine}
            capacity = row.report.kv_capacity if row.report is not None else 0
            free = float(capacity or self._shared.config.rollout.kv_cache_tokens)
            loadable = self._weights.loadable(machine, loading)
            if row.held and row.report is not None:  # what it lacks it loads beside the others
                free -= row.report.held_tokens
                loadable |= frozenset(row.held)
            price = 0.0 if row.held else tokens_per_reload
            idle.append(failover.Idle(replica, serves, loadable, free, price))
        return idle

    def _regrant(self, reload: failover.Reload, batch_id: int) -> Rescue:
        now, replica, weight_id = time.monotonic(), reload.replica, reload.weight_id
        member = self._shared.members.at("rollout", replica)
        assert member is not None
        waited = {i: self._waiting.pop(i) for i in reload.trajectory_ids}
        known = {i: part for i, (attempt, _) in waited.items() if (part := self._pool.get(i, attempt))}
        attempts = {i: attempt for i, (attempt, _) in waited.items()}
        groups = self._tracker.owners.regrant(attempts, replica, weight_id)
        rescue = Rescue(batch_id, replica, weight_id, member.hello.machine, groups, {}, {})
        for i, attempt in rescue.attempts():
            rescue.parts[i] = moved(known[i])
            rescue.resumed[i] = known[i].count, now - waited[i][1]
            self._pool.put(i, attempt, rescue.parts[i])
        log.info("%d trajectories go on at replica %d on weight id %d", len(rescue.parts), replica, weight_id)
        row = self._replicas.at(replica)
        if row.weight_id == weight_id or row.held:
            self._record(rescue, loaded=row.weight_id != weight_id and weight_id not in row.held)
        else:
            self._loading[replica] = rescue
        return rescue

    def _record(self, rescue: Rescue, loaded: bool) -> None:
        for trajectory_id, (tokens, seconds) in rescue.resumed.items():
            self._shared.metrics.write(
                "move",
                trajectory_id=trajectory_id,
                source=None,
                destination=rescue.replica,
                weight_id=rescue.weight_id,
                tokens=tokens,
                prefix_tokens=0,
                seconds=seconds,
                loaded=loaded,
            )
