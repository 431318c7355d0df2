"""The crew: the replicas among which the work is divided. Local batches, rounds and evaluations are
sized by it.

    Hello, while nobody serves weights yet -> in the crew: it starts with the run
    Hello, later                           -> in the crew with its first weights: its engine may load for long
    Leaving, a death, an engine that hangs -> out

At a fresh start the crew counts as rollout.replicas_min at least, until so many have been there.
"""

import math

from laminar_hpc.controller.fleet.members import Members
from laminar_hpc.controller.fleet.replicas import Replicas
from laminar_hpc.controller.shared import Shared


class ActiveReplicas:
    """`awaited`: replicas that may have outlived the last controller; one that is heard of is taken out."""

    def __init__(self, shared: Shared, replicas: Replicas, awaited: set[int]) -> None:
        config = shared.config
        self._members: Members = shared.members
        self._replicas = replicas
        self._awaited = awaited
        self._starting: set[int] = set()  # there since the run began, without weights yet
        self._known = frozenset[int]()
        self._known_at = (-1, 0, 0)
        self._joins = 0  # changes of `_starting`
        self._local_batch = config.pipeline.local_batch_groups
        self._groups = config.algorithm.prompts_per_step
        # a run that is under way goes on with whoever there is
        self._minimum = 1 if shared.state.trainer_generation else replicas_min(shared)

    # ---- what happens --------------------------------------------------------------------------------------

    def joined(self, replica: int) -> None:
        """It is a new member."""
        self._joins += 1
        if not self._replicas.served():
            self._starting.add(replica)
        if self._members.count("rollout") >= self._minimum:
            self._minimum = 1

    def opened(self, replica: int) -> None:
        """It serves weights."""
        self._joins += replica in self._starting
        self._starting.discard(replica)

    def replica_lost(self, replica: int) -> None:
        self._joins += replica in self._starting
        self._starting.discard(replica)

    # ---- what follows --------------------------------------------------------------------------------------

    def replicas(self) -> frozenset[int]:
        """Their numbers."""
        now = (self._replicas.changes, self._joins, len(self._awaited))  # which nobody is added to
        if now != self._known_at:
            rows = self._replicas.rows()
            serving = {index for index, row in rows.items() if row.weight_id is not None}
            there = (serving | self._starting | self._awaited) - set(self._replicas.leaving())
            self._known = frozenset(there)
            self._known_at = now
        return self._known

    @property
    def minimum(self) -> int:
        """So many must be there before any round opens."""
        return self._minimum

    @property
    def size(self) -> int:
        """Counts the active replicas; at least 1."""
        return max(1, self._minimum, len(self.replicas()))

    @property
    def local_batch_groups(self) -> int:
        """Counts the groups of the next local batch."""
        return self._local_batch or math.ceil(self._groups / self.size)


def replicas_min(shared: Shared) -> int:
    """How many rollouts are awaited at the start; 0 in a replay."""
    rollout = shared.config.rollout
    return min(shared.derived.rollout_ranks, rollout.replicas_min or rollout.fewest)
