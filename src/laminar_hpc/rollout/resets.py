"""Environments of a replica's next local batch, reset while its present one ends, so that its first tokens
need not wait for them."""

from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.rollout.state import ReplicaState


class ResetsAhead:
    """Owned by worker.py. `pool`: None where there are no environments."""

    def __init__(self, pool: EnvironmentPool | None, state: ReplicaState) -> None:
        self._pool = pool
        self._state = state
        self._rows: list[tuple[dict, int]] = []
        self._half = 0.0

    def told(self, rows: list[tuple[dict, int]], trajectories: int) -> None:
        """With a grant of so many trajectories, which begins now: what the next one will be made of. Not
        earlier than half of it has ended are environments for that begun, as they wait and take room."""
        self._rows = rows
        self._half = trajectories / 2

    def look(self) -> None:
        """When a trajectory has ended."""
        if self._pool is not None and self._rows and self._state.in_flight <= self._half:
            self._pool.expect(self._rows)
            self._rows = []
