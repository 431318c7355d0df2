"""Trajectories of dead replicas that no running replica could take: they wait for one without work that loads
their weights.

    migration: a replica is gone, nobody generates with its weights -> `wait`
    dispatch -> [failover.load] -> Grant with parts -> WeightsOpened: they go on there
                                                    -> NotLoaded: the next one, or back to the prompt

Owns those that wait and those whose weights are being loaded; the latter belong to their new replica from its
grant on, as in any grant.
"""

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar_hpc import messages as m
from laminar_hpc.controller.members import Member
from laminar_hpc.controller.partials import PartialPool
from laminar_hpc.policies import failover
from laminar_hpc.policies.moves import NOBODY

if TYPE_CHECKING:
    from laminar_hpc.controller.loop import Controller

log = logging.getLogger(__name__)


@dataclass
class _Rescue:
    """A grant whose weights are being loaded: trajectory -> attempt, response tokens so far, seconds for
    which it had waited."""

    batch_id: int
    weight_id: int
    machine: str
    trajectories: dict[int, tuple[int, int, float]]


class Rescuer:
    def __init__(self, controller: "Controller", pool: PartialPool) -> None:
        self.c, self.pool = controller, pool
        # trajectory -> attempt, monotonic seconds since when
        self._waiting: dict[int, tuple[int, float]] = {}
        self._loading: dict[int, _Rescue] = {}  # by replica
        self.rescued = 0

    def wait(self, trajectory_id: int, attempt: int) -> None:
        self.c.tracker.hold(trajectory_id)
        self._waiting[trajectory_id] = (attempt, time.monotonic())

    def ended(self, trajectory_id: int) -> None:
        """Its replica was not dead after all, and has said how it ended."""
        self._waiting.pop(trajectory_id, None)

    def replica_gone(self, replica: int) -> None:
        self._loading.pop(replica, None)

    # ---- who takes them ------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Gives them to replicas without work, or back to their prompts, as failover.load says."""
        if not self._waiting or self.c.trainer_done or (self.c.stopping and not self.c.taken):
            return
        loads, again = failover.load(self._orphans(), self._idle())
        while loads:  # one at a time: what is loadable then is less
            self._grant(loads[0])
            loads, again = failover.load(self._orphans(), self._idle())
        for trajectory_id in again:
            attempt, _ = self._waiting.pop(trajectory_id)
            self.c.migration.begin_anew(trajectory_id, attempt)

    def _orphans(self) -> list[failover.Orphan]:
        return [
            self.c.migration.orphan(i, part)
            for i, (attempt, _) in self._waiting.items()
            if (part := self.pool.get(i, attempt))
        ]

    def _idle(self) -> list[failover.Idle]:
        """Replicas that ask for work, but for those that will pull first, and those that are starting and
        have been given nothing yet."""
        c, found = self.c, []
        tokens_per_load = c.pull_seconds * max(
            (load.tokens_per_second for load in c.loads.values()), default=0.0
        )
        for member in c.members.all("rollout"):
            replica, machine = member.hello.index, member.hello.machine
            load, newest = c.loads.get(replica), c.weights.of_machine.get(machine, (-1, -1))[0]
            if replica in c.waiting and c.waiting[replica].weight_id >= newest:
                serves = c.waiting[replica].weight_id
            elif load is not None and load.phase == "unverified" and replica not in c.granted:
                serves = -1
            else:
                continue
            loading = {rescue.weight_id for rescue in self._loading.values() if rescue.machine == machine}
            capacity = (
                load.kv_capacity
                if load is not None and load.kv_capacity
                else c.config.rollout.kv_cache_tokens
            )
            found.append(
                failover.Idle(
                    replica, serves, c.weights.loadable(machine, loading), float(capacity), tokens_per_load
                )
            )
        return found

    def _grant(self, load: failover.Load) -> None:
        c, now = self.c, time.monotonic()
        member = c.members.at("rollout", load.replica)
        assert member is not None
        waited = {i: self._waiting.pop(i) for i in load.trajectory_ids}
        known = {i: part for i, (attempt, _) in waited.items() if (part := self.pool.get(i, attempt))}
        groups = c.tracker.regrant(
            {i: attempt for i, (attempt, _) in waited.items()}, load.replica, load.weight_id
        )
        rescue = _Rescue(c.batches, load.weight_id, member.hello.machine, {})
        parts = {}
        for sample in (sample for group in groups for sample in group.samples):
            i, part = sample.trajectory_id, known[sample.trajectory_id]
            parts[i] = m.Partial(part.tokens, part.logprobs, part.spans, part.time_started, part.moves + 1)
            self.pool.put(i, sample.attempt, parts[i])
            rescue.trajectories[i] = (sample.attempt, len(part.tokens), now - waited[i][1])
        serves = c.open_weights.get(load.replica) == load.weight_id
        step, sampling = c.weights.steps[load.weight_id], c.config.sampling
        more = c.training_grant(load.replica, load.weight_id, step) if serves else None
        groups += more.groups if more is not None else []
        log.info(
            "%d trajectories go on at replica %d on weight id %d", len(parts), load.replica, load.weight_id
        )
        c.grant(
            member,
            m.Grant(
                c.batches,
                load.weight_id,
                step,
                groups,
                sampling.temperature,
                sampling.max_response_tokens,
                parts=parts,
            ),
        )
        if serves:
            self._count(load.replica, rescue, loaded=False)
        else:
            self._loading[load.replica] = rescue

    # ---- what became of it ---------------------------------------------------------------------------------

    def opened(self, replica: int, weight_id: int) -> None:
        rescue = self._loading.get(replica)
        if rescue is not None and rescue.weight_id == weight_id:
            self._count(replica, self._loading.pop(replica), loaded=True)

    def _count(self, replica: int, rescue: _Rescue, loaded: bool) -> None:
        self.rescued += len(rescue.trajectories)
        for trajectory_id, (_, tokens, seconds) in rescue.trajectories.items():
            self.c.metrics.write(
                "move",
                trajectory_id=trajectory_id,
                source=NOBODY,
                destination=replica,
                weight_id=rescue.weight_id,
                tokens=tokens,
                prefix_tokens=0,
                seconds=seconds,
                loaded=loaded,
            )

    def not_loaded(self, member: Member, message: m.NotLoaded) -> list[tuple[int, int]]:
        """(trajectory, attempt) of a grant that came to nothing."""
        rescue = self._loading.get(member.hello.index)
        if rescue is None or rescue.batch_id != message.batch_id:
            return []
        del self._loading[member.hello.index]
        log.warning(
            "%s could not go on with %d trajectories: %s",
            member.name,
            len(rescue.trajectories),
            message.reason,
        )
        self.c.weights.gone_from(rescue.machine, rescue.weight_id)
        found = [
            (i, attempt)
            for i, (attempt, _, _) in rescue.trajectories.items()
            if self.c.tracker.counts_as(i, attempt)
        ]
        for trajectory_id, _ in found:
            self.c.tracker.hold(trajectory_id)
            self.c.metrics.write(
                "move_off", trajectory_id=trajectory_id, source=NOBODY, reason=message.reason
            )
        return found
