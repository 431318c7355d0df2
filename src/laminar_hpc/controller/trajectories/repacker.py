"""When replicas are emptied into others, and which: feeds policies/repack.py with the replicas' reports and
begins the moves that it plans.

Called by the controller's tick every `pipeline.repack_seconds`, and once more after each publication.
"""

import math
import time
from collections import defaultdict

from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.migration import Migration
from laminar_hpc.controller.weights.weight_ids import HeldVersion, Weights
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.policies import admission, repack
from laminar_hpc.policies.moves import room
from laminar_hpc.policies.sizing import saturation_requests

KV_SHARE = 0.9  # C_max as a share of the cache: room for growth without preemption


class Repacker:
    """Called at each tick; begins moves."""

    def __init__(self, tables: Tables, weights: Weights, migration: Migration) -> None:
        self._shared = tables
        self._config = tables.config
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._pool = tables.pool
        self._weights = weights
        self._migration = migration
        self._next = 0.0
        self._planned_at: HeldVersion | None = None  # the newest weights there were at the last planning

    def tick(self, now: float) -> None:
        """`now`: monotonic seconds."""
        if not self._config.pipeline.empties or self._config.environment.stays:
            return
        due, newest = now >= self._next, self._weights.newest
        if due or newest != self._planned_at:
            self._planned_at = newest
            if due:  # a look in between delays none
                self._next = now + self._config.pipeline.repack_seconds
            self.consolidate(now)

    def consolidate(self, now: float) -> None:
        """Plans and begins moves inside each place, unless an emptied replica would find no work."""
        candidates, emptied_max = self._candidates(), self._batches_ahead()
        limits = self._limits(list(candidates.values()))
        if len(candidates) < 2 or emptied_max <= 0 or limits is None:
            return
        begun = time.perf_counter()
        places = defaultdict[str | None, list[repack.ReplicaView]](list)
        for replica, report in candidates.items():
            places[self._shared.members.place("rollout", replica)].append(self._view(replica, report))
        transfers = list[repack.Transfer]()
        for views in places.values():  # nothing moves over the link between two
            left = emptied_max - len({each.source for each in transfers if each.empties})
            if left > 0:
                transfers += repack.plan(views, limits, self._migration.costs, left)
        seconds = time.perf_counter() - begun
        if transfers:
            moved = sum([self._begin(each, candidates[each.source], now) for each in transfers])
            self._shared.metrics.write(
                "repack",
                replicas=len(candidates),
                sources=[each.source for each in transfers],
                destinations=[each.destination for each in transfers],
                trajectories=moved,
                planner_ms=seconds * 1e3,
            )

    def _candidates(self) -> dict[int, ReplicaLoad]:
        """Replicas that generate for training (the tracker knows their work), all of it in their engines, and
        that no move under way concerns.

        Some of a report's requests may have ended since: the tracker's count is the newer one, and never the
        larger."""
        busy, count = self._migration.busy_replicas(), self._tracker.groups.holders.generating_counts()
        return {
            replica: report
            for replica, row in self._replicas.rows().items()
            if replica not in busy
            and (report := row.current_report) is not None
            and self._shared.members.at("rollout", replica) is not None
            and report.phase == "draining"
            and 0 < count.get(replica, 0) <= report.in_flight <= self._config.rollout.max_concurrent
            and report.weight_id is not None
            and report.weight_id == row.weight_id
            and not row.leaving
        }

    def _limits(self, reports: list[ReplicaLoad]) -> repack.EngineLimits | None:
        """Of the smallest engine; None while nothing is known of them."""
        pipeline, curves = self._config.pipeline, [each.decode_curve for each in reports if each.decode_curve]
        measured = min(map(saturation_requests, curves), default=0)
        requests = pipeline.repack_requests or measured
        if not reports or not requests or (pipeline.repack == "auto" and not curves):
            return None
        return repack.EngineLimits(
            KV_SHARE * min(report.kv_capacity for report in reports),
            requests,
            max(curves, key=lambda curve: curve[0][1]) if pipeline.repack == "auto" else (),
            prefills=not self._migration.with_kv,
        )

    def _batches_ahead(self) -> int:
        """Local batches that admission would give to replicas on the newest weights."""
        newest, config = self._weights.newest, self._config
        if self._shared.state.stopping or newest is None:
            return 0
        size, bound = config.algorithm.prompts_per_step, self._shared.staleness.of_weights(newest.step)
        groups = admission.quota(newest.step, self._tracker.counted, size, config.steps, bound)
        there = min(max(len(self._replicas.rows()), config.rollout.fewest), config.rollout.most)
        local = config.pipeline.local_batch_groups or math.ceil(size / there)
        return math.ceil(groups / local)

    def _view(self, replica: int, report: ReplicaLoad) -> repack.ReplicaView:
        assert report.weight_id is not None  # as of all candidates
        return repack.ReplicaView(
            replica,
            report.weight_id,
            report.held_tokens,
            report.in_flight,
            lambda: self._requests(replica, report),
            report.queued,
        )

    def _requests(self, replica: int, report: ReplicaLoad) -> list[repack.RequestView]:
        """Of a response that the pool does not know yet, the mean of the replica; the last ones of these are
        taken for what waits in its engine."""
        found: list[repack.RequestView] = []
        queued = report.queued
        for group, trajectory_id, sample in reversed(self._tracker.groups.holders.generating(replica)):
            prompt = len(self._tracker.groups.prompt_of(group).tokens)
            partial = self._pool.get(trajectory_id, sample.attempt)
            waits = partial is None and queued > 0
            queued -= waits
            mean = report.held_tokens / max(1, report.in_flight - report.queued)
            tokens = prompt if waits else prompt + partial.count if partial else max(prompt, mean)
            remaining = self._tracker.lengths.expected(tokens - prompt)
            found.append(repack.RequestView(trajectory_id, group.group_id, tokens, remaining, waits))
        return found[::-1]

    def _begin(self, transfer: repack.Transfer, report: ReplicaLoad, now: float) -> int:
        """Moves what the source still has of it; returns how many trajectories that is."""
        assert report.weight_id is not None  # as of all candidates
        begun, response_max = 0, self._config.sampling.max_response_tokens
        for group, trajectory_id, sample in self._tracker.groups.holders.generating(transfer.source):
            if trajectory_id in transfer.trajectories and trajectory_id not in self._migration.moving:
                prompt = len(self._tracker.groups.prompt_of(group).tokens)
                tokens = room(prompt, response_max, report.held_tokens, report.in_flight)
                tokens = tokens if transfer.empties else 0  # what waits has no KV
                ends = (transfer.source, transfer.destination)
                self._migration.begin(trajectory_id, sample.attempt, *ends, report.weight_id, tokens, now)
                begun += 1
        return begun
