"""What the controller has granted to a replica, until its local batch begins: grants that wait, in order, and
the trajectories of the one whose weights are being loaded. Owned by worker.py.

Other weights are held from the arrival of a grant that needs them: the engine may have to start first, while
newer weights come and take slots.
"""

from collections import deque
from collections.abc import Callable

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.line.messages.rollouts import Grant
from laminar_hpc.rollout.in_flight import TrajectoryInFlight, granted
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.rollout.weight_loader import WeightLoader


class Grants:
    """`newest_batch`: of all that came; `route_shape`: as `granted` takes it; `ahead`: asking.py."""

    def __init__(
        self,
        state: ReplicaState,
        weight_loader: WeightLoader,
        route_shape: RouteShape | None = None,
        ahead: bool = False,
    ) -> None:
        self._state = state
        self._weight_loader = weight_loader
        self._route_shape = route_shape
        self._ahead = ahead
        self.newest_batch: int | None = None
        self._waiting: deque[Grant] = deque()
        self._beginning: list[TrajectoryInFlight] = []

    def __bool__(self) -> bool:
        """Whether any waits."""
        return bool(self._waiting)

    def add(self, grant: Grant) -> None:
        """Raises SlotGone where the weights that it needs are not there."""
        self.newest_batch = grant.batch_id
        if self.loads(grant):
            self._weight_loader.hold(grant.weight_id)
        self._waiting.append(grant)

    def loads(self, grant: Grant) -> bool:
        """It needs other weights than are open: for trajectories that began with them elsewhere, or as it
        was asked for ahead."""
        return (self._ahead or bool(grant.parts)) and not self._state.serves(grant.weight_id)

    def take(self) -> Grant:
        """The next one."""
        return self._waiting.popleft()

    def begin(self, grant: Grant) -> list[TrajectoryInFlight]:
        """Returns the grant's trajectories, which stay here until `begun`."""
        self._beginning = granted(grant, self._route_shape)
        return self._beginning

    def begun(self, grant: Grant) -> None:
        """The local batch has its trajectories, or nobody has: its weights are loaded, or will not be."""
        self._beginning = []
        if self._ahead or grant.parts:
            self._weight_loader.let_go()

    # ---- another session with the controller ---------------------------------------------------------------

    @property
    def trajectories(self) -> list[TrajectoryInFlight]:
        """All that will be generated."""
        return [*self._beginning, *(trajectory for grant in self._waiting for trajectory in granted(grant))]

    def drop_evaluations(self) -> None:
        """Those that wait; their shares are granted anew."""
        self._waiting = deque(grant for grant in self._waiting if not grant.evaluation)

    def drop(self, attempts: set[tuple[int, int]]) -> None:
        """Those of (trajectory, attempt) that wait."""
        for grant in self._waiting:
            for group in grant.groups:
                group.samples = [s for s in group.samples if (s.trajectory_id, s.attempt) not in attempts]

    def drop_beginning(self, gone: Callable[[TrajectoryInFlight], bool]) -> None:
        """Those whose weights are being loaded."""
        for trajectory in filter(gone, self._beginning):
            trajectory.drop()
