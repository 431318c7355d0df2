"""Complete responses whose replica died before their score came: scored by another one.

    replica lost, or a start over a store -> owners.unscored -> `assign`, each tick -> ScoreOrder -> Scored

Owns which replica was asked for which. When that one dies too, the next is asked; a score that comes twice
counts once (controller/trajectories/tracker.py). Without a replica that serves weights they wait.
"""

import logging
from collections import Counter
from heapq import heapify, heapreplace
from itertools import islice

from laminar_hpc.controller.tables import Tables

log = logging.getLogger(__name__)
_AT_ONCE = 64  # asked of one replica; more would keep its own responses waiting


class Scorers:
    """Called when a replica is lost, for each score, and at each tick."""

    def __init__(self, tables: Tables) -> None:
        self._shared = tables
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._asked: dict[int, int] = {}  # trajectory -> replica

    def replica_lost(self, replica: int) -> None:
        """Other replicas score what it was to score."""
        for trajectory_id in self._tracker.groups.holders.scoring(replica):
            self._asked.pop(trajectory_id, None)
            self._tracker.owners.scorer_lost(trajectory_id)

    def scored(self, trajectory_id: int) -> None:
        self._asked.pop(trajectory_id, None)

    def assign(self) -> None:
        """Asks the replicas that have least to score; those that serve weights have their reward workers."""
        if not self._tracker.owners.unscored:
            return
        rows, members, counts = self._replicas.rows(), self._shared.members, Counter(self._asked.values())
        serving = [i for i, row in rows.items() if row.weight_id is not None and not row.leaving]
        ready = [(counts[i], i) for i in serving if members.at("rollout", i)]  # fewest first
        heapify(ready)
        sent = Counter[int]()
        for trajectory_id in list(islice(self._tracker.owners.unscored, _AT_ONCE * len(ready))):
            asked, replica = ready[0]
            if asked >= _AT_ONCE:
                break
            heapreplace(ready, (asked + 1, replica))
            sent[replica] += 1
            self._asked[trajectory_id] = replica
            order = self._tracker.owners.score_at(trajectory_id, replica)
            self._shared.outbox.send(members.at("rollout", replica), order)
        for replica, count in sent.items():
            log.info("replica %d scores %d responses whose own replica is gone", replica, count)
            self._shared.metrics.write("scored_elsewhere", replica=replica, trajectories=count)
