"""What the controller knows of trajectories and replicas: the second layer of its parts (parts.py)."""

from dataclasses import dataclass

from laminar_hpc.controller.fleet.replicas import Replicas
from laminar_hpc.controller.shared import Shared
from laminar_hpc.controller.staleness import StalenessControl
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Tables(Shared):
    """`replay`: the store of another run, which has all batches. `slots`: its folder in shared memory."""

    store: Store
    tracker: TrajectoryTracker
    staleness: StalenessControl
    evaluations: Evaluations | None
    replay: Store | None
    slots: str
    replicas: Replicas
    pool: PartialResponsePool
