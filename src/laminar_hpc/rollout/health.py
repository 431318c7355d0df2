"""When a replica whose responses come back unusable must end: once may be chance, again and again is not."""

from collections import Counter

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import EngineDied, EngineHangs
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.partial_response import first_not_finite
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.rollout.weight_loader import OVERFLOW_CURE

MAX_OVERFLOWS = 3  # of one trajectory on one replica, see partial_response.objection
MAX_HANGS_IN_A_ROW = 3
# one may be bad luck (a time-out); an engine that refuses everything must not be fed for ever
MAX_LOST_BATCHES_IN_A_ROW = 3


class BatchHealth:
    """Counts over one local batch after the other: `begin`, `finished` and `lost` of each trajectory, `end`.
    `lost` and `end` raise LaminarError when the replica must not go on."""

    def __init__(self, replica: int, state: ReplicaState, engines: EngineLives) -> None:
        self.replica = replica
        self.state = state
        self.engines = engines
        self.tokens = 0  # of the responses of this local batch
        self._overflowed = 0  # responses of this local batch with log-probs that are not finite
        self._ungraded = 0  # responses of this local batch whose environments failed
        self._ended_lost = False  # a response of this local batch is lost
        self._overflows: Counter[tuple[str, int]] = Counter()  # the same by evaluation and trajectory
        self._lost_batches_in_a_row = self._hangs_in_a_row = 0
        self._last_reason = ""

    def begin(self) -> None:
        """A local batch begins."""
        self.tokens = self._overflowed = self._ungraded = 0
        self._ended_lost = False

    def more(self, trajectories: int, moved_away: int) -> None:
        """So many trajectories come into the batch (versions.py): what has ended so far counts as one."""
        if self.tokens or self._ended_lost:
            self.end(trajectories, moved_away)
            self.begin()

    def finished(self, tokens: int) -> None:
        """A response of so many tokens is whole."""
        self.tokens += tokens

    def lost(self, trajectory: TrajectoryInFlight, reason: str, ungraded: bool = False) -> None:
        """A response is lost; `ungraded`: because its environment failed."""
        self._last_reason = reason
        self._ended_lost = True
        self._ungraded += ungraded
        if first_not_finite(trajectory.partial) is None:
            return
        key = (trajectory.evaluation, trajectory.trajectory_id)
        self._overflowed += 1
        self._overflows[key] += 1
        if self._overflows[key] >= MAX_OVERFLOWS:
            raise self._overflow(
                f"{MAX_OVERFLOWS} responses to one prompt (trajectory {trajectory.trajectory_id})"
            )

    def hung(self, error: EngineHangs | EngineDied) -> None:
        """The engine hung or died in this local batch. Raises what ends a replica if it does repeatedly."""
        self._hangs_in_a_row += 1
        if self._hangs_in_a_row == MAX_HANGS_IN_A_ROW:
            raise LaminarError(f"{error}, as {MAX_HANGS_IN_A_ROW} in a row; see {self.engines.current.log}")

    def end(self, trajectories: int, moved_away: int) -> None:
        """The local batch of so many trajectories is done."""
        self._hangs_in_a_row = 0
        if trajectories and self._overflowed >= trajectories:
            raise self._overflow(f"all {trajectories} responses of a local batch")
        lost_all = not self.tokens and not moved_away and not self._ungraded
        self._lost_batches_in_a_row = self._lost_batches_in_a_row + 1 if lost_all else 0
        if self._lost_batches_in_a_row == MAX_LOST_BATCHES_IN_A_ROW:
            raise LaminarError(
                f"rollout {self.replica} lost all trajectories of {MAX_LOST_BATCHES_IN_A_ROW} "
                f"local batches in a row, the last one because {self._last_reason}: see its log and "
                f"{self.engines.current.log}"
            )

    def _overflow(self, what: str) -> LaminarError:
        engine = self.engines.current
        return LaminarError(
            f"{engine.name} gave log-probs that are not finite for {what}, with the trainer's weights of id "
            f"{self.state.weight_id} bit for bit, which are finite: {OVERFLOW_CURE}; see {engine.log}"
        )
