"""When replicas are emptied into others, and which: feeds policies/repack.py with the replicas' reports and
begins the moves that it plans.

Called by the controller's tick every `pipeline.repack_seconds`, and once more after each publication.
"""

import time
from dataclasses import dataclass

from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.migration import Migration
from laminar_hpc.controller.weights.weight_ids import HeldVersion, Weights
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.policies import admission, repack
from laminar_hpc.policies.moves import room

KV_SHARE = 0.9  # C_max as a share of the cache: room for growth without preemption


@dataclass(frozen=True)
class _Seen:
    """A replica's report at the newest planning, of which local batch it is (None: not known), and its KV
    tokens at the one before."""

    report: ReplicaLoad
    batch: int | None
    kv_tokens_before: float


class Repacker:
    """Called at each tick; begins moves and keeps what it saw at its last planning."""

    def __init__(self, tables: Tables, weights: Weights, migration: Migration) -> None:
        self._shared = tables
        self._config = tables.config
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._weights = weights
        self._migration = migration
        self._seen: dict[int, _Seen] = {}  # by replica
        self._next = 0.0
        self._planned_at: HeldVersion | None = None  # the newest weights there were at the last planning

    def tick(self, now: float) -> None:
        """`now`: monotonic seconds."""
        pipeline = self._config.pipeline
        if pipeline.repack == "off" or pipeline.refresh == "versions" or self._config.environment.stays:
            return  # one with several versions takes new work beside its tail
        due, newest = now >= self._next, self._weights.newest
        if due or newest != self._planned_at:
            self._planned_at = newest
            if due:  # a look in between delays none
                self._next = now + self._config.pipeline.repack_seconds
            self.consolidate(now)

    def consolidate(self, now: float) -> None:
        """Plans and begins moves, unless an emptied replica would find no work."""
        count = self._tracker.groups.holders.generating_counts()
        self._seen = {
            # with more on it than it reports it has been granted a local batch since
            replica: self._compared(
                replica, report, row.newest_batch if count.get(replica, 0) <= report.in_flight else None
            )
            for replica, row in self._replicas.rows().items()
            if (report := row.current_report) is not None
        }
        candidates = self._candidates()
        if len(candidates) < 2 or not self._work_ahead():
            return
        begun = time.perf_counter()
        capacity = KV_SHARE * min(seen.report.kv_capacity for seen in candidates.values())
        measured = [seen.report.batch_max for seen in candidates.values() if seen.report.batch_max]
        requests_max = self._config.pipeline.repack_requests or min(measured, default=0)
        merges = repack.plan([_view(*item) for item in candidates.items()], capacity, requests_max)
        seconds = time.perf_counter() - begun
        if merges:
            moved = sum([self._begin(merge, candidates[merge.source].report, now) for merge in merges])
            self._shared.metrics.write(
                "repack",
                replicas=len(candidates),
                sources=[merge.source for merge in merges],
                destinations=[merge.destination for merge in merges],
                trajectories=moved,
                planner_ms=seconds * 1e3,
            )

    def _compared(self, replica: int, report: ReplicaLoad, batch: int | None) -> _Seen:
        """KV use falls if it is lower than at the planning before, and the replica drained the same local
        batch at both. The same report at two plannings tells nothing: a ping may repeat it, or the next one
        is not here yet."""
        earlier = self._seen.get(replica)
        if earlier is None:
            return _Seen(report, batch, 0.0)
        if earlier.report == report:
            return earlier
        same = batch is not None and batch == earlier.batch
        comparable = same and earlier.report.weight_id == report.weight_id and _drains(earlier.report)
        return _Seen(report, batch, earlier.report.held_tokens if comparable else 0.0)

    def _candidates(self) -> dict[int, _Seen]:
        """Replicas that generate for training (the tracker knows their work), with nothing waiting, and that
        no move under way concerns.

        Some of a report's requests may have ended since: the tracker's count is the newer one, and never the
        larger."""
        busy, count = self._migration.busy_replicas(), self._tracker.groups.holders.generating_counts()
        return {
            replica: seen
            for replica, seen in self._seen.items()
            if replica not in busy
            and self._shared.members.at("rollout", replica) is not None
            and _drains(seen.report)
            and 0 < count.get(replica, 0) <= seen.report.in_flight <= self._config.rollout.max_concurrent
            and seen.report.weight_id is not None
            and seen.report.weight_id == self._replicas.at(replica).weight_id
            and not self._replicas.at(replica).leaving
        }

    def _work_ahead(self) -> bool:
        """Whether admission would give a replica on the newest weights something to do."""
        newest, config = self._weights.newest, self._config
        if self._shared.state.stopping or newest is None:
            return False
        size, bound = config.algorithm.prompts_per_step, self._shared.staleness.of_weights(newest.step)
        return admission.quota(newest.step, self._tracker.counted, size, config.steps, bound) > 0

    def _begin(self, merge: repack.Merge, report: ReplicaLoad, now: float) -> int:
        """Moves whatever the source has in progress; returns how many trajectories that is."""
        assert report.weight_id is not None  # as of all candidates
        begun = 0
        for group, trajectory_id, sample in self._tracker.groups.holders.generating(merge.source):
            if trajectory_id not in self._migration.moving:
                prompt = len(self._tracker.groups.prompt_of(group).tokens)
                response_max = self._config.sampling.max_response_tokens
                tokens = room(prompt, response_max, report.held_tokens, report.in_flight)
                ends = (merge.source, merge.destination)
                self._migration.begin(trajectory_id, sample.attempt, *ends, report.weight_id, tokens, now)
                begun += 1
        return begun


def _view(replica: int, seen: _Seen) -> repack.ReplicaView:
    report = seen.report
    assert report.weight_id is not None
    return repack.ReplicaView(
        replica, report.weight_id, report.held_tokens, seen.kv_tokens_before, report.in_flight, report.waiting
    )


def _drains(report: ReplicaLoad) -> bool:
    """It generates, and nothing waits in its engine."""
    return report.phase == "draining" and report.queued == 0
