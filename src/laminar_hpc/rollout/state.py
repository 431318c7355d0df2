"""The state of one replica as a pure machine: which weights it serves, and what it may do next. Owns no
engine, no task and no clock.

    UNVERIFIED --begin_pull--> PULLING --verified--> VERIFIED --open--> OPEN(id) --grant--> DRAINING
         ^                      |  ^                                     |   ^                  |
         '------- failed -------'  '------------- begin_pull ------------'   '--- last token ---'

A reservation counts as a request in flight, so that a reserved replica cannot pull. An interrupted batch
stays in flight over a pull. Invariants: a request is admitted only for the id that it names and that is open;
weights are replaced only while nothing is in flight or all of it stands still; an id goes back only for
trajectories that began with it elsewhere (`back`). Any step that would break one raises WrongState and
changes nothing. Driven by worker.py and migration.py, tested with plain values.

    >>> state = ReplicaState()
    >>> state.begin_pull(3); state.verified(3); state.open(weight_step=2)
    >>> state.grant(3, requests=2); state.phase
    <ReplicaPhase.DRAINING: 'draining'>
    >>> state.finished(); state.finished(); state.phase
    <ReplicaPhase.OPEN: 'open'>
"""

from enum import Enum


class ReplicaPhase(Enum):
    """What a replica is doing, see the top of this file."""

    UNVERIFIED = "unverified"  # the engine holds weights that nobody has checked
    PULLING = "pulling"
    VERIFIED = "verified"  # loaded, sums equal, probe scored; not announced yet
    OPEN = "open"  # idle on announced weights
    DRAINING = "draining"  # a local batch is in flight; only moves add to it


class WrongState(Exception):
    """This step is not allowed now."""


class ReplicaState:
    """See the top of this file. `in_flight`: requests of the local batch, and reservations."""

    def __init__(self) -> None:
        self.phase = ReplicaPhase.UNVERIFIED
        self.weight_id: int | None = None  # the open id
        self.weight_step: int | None = None
        self.in_flight = 0
        self._pulling_id = 0  # while PULLING or VERIFIED

    @property
    def held(self) -> list[int]:
        """All open ids, where there may be several: versions.py."""
        return []

    def serves(self, weight_id: int) -> bool:
        """Requests on this id are admitted, now or when nothing else is in flight."""
        return weight_id == self.weight_id

    @property
    def next_weight_id(self) -> int:
        """The lowest id that is newer than the open one."""
        return 0 if self.weight_id is None else self.weight_id + 1

    def _require(self, allowed: bool, step: str) -> None:
        if not allowed:
            raise WrongState(
                f"{step} is not allowed in {self.phase.value} (weight "
                f"id {self.weight_id}, {self.in_flight} in flight)"
            )

    # ---- weights -------------------------------------------------------------------------------------------

    def begin_pull(self, weight_id: int, interrupted: bool = False, back: bool = False) -> None:
        """The engine is about to be given other weights, newer ones unless `back`. `interrupted`: what is in
        flight stands still."""
        ready = self.phase in (ReplicaPhase.UNVERIFIED, ReplicaPhase.OPEN) and self.in_flight == 0
        self._require(
            ready or (interrupted and self.phase is ReplicaPhase.DRAINING), f"pulling weight id {weight_id}"
        )
        self._require(weight_id >= self.next_weight_id or back, f"going back to weight id {weight_id}")
        self.phase = ReplicaPhase.PULLING
        self._pulling_id = weight_id

    def failed(self) -> None:
        """The slot was gone: nobody knows what the engine holds, and the newest weights are due."""
        self._require(self.phase is ReplicaPhase.PULLING and self.in_flight == 0, "a pull that failed")
        self.phase = ReplicaPhase.UNVERIFIED
        self.weight_id = None
        self.weight_step = None

    def abandoned(self) -> None:
        """The engine is gone, and all that was in flight with it."""
        self.phase = ReplicaPhase.UNVERIFIED
        self.weight_id = None
        self.weight_step = None
        self.in_flight = 0

    def verified(self, weight_id: int) -> None:
        """`weight_id` is in the engine and verified: the one that was asked for, or a newer one."""
        self._require(
            self.phase is ReplicaPhase.PULLING and weight_id >= self._pulling_id,
            f"a verification of weight id {weight_id}",
        )
        self.phase = ReplicaPhase.VERIFIED
        self._pulling_id = weight_id

    def open(self, weight_step: int) -> None:
        """The verified weights, of that trainer step, are announced."""
        self._require(self.phase is ReplicaPhase.VERIFIED, "opening")
        self.phase = ReplicaPhase.DRAINING if self.in_flight else ReplicaPhase.OPEN
        self.weight_id = self._pulling_id
        self.weight_step = weight_step

    # ---- work ----------------------------------------------------------------------------------------------

    def grant(self, weight_id: int, requests: int) -> None:
        """A local batch of `requests` requests on `weight_id` begins."""
        self._require(
            self.phase is ReplicaPhase.OPEN and weight_id == self.weight_id, f"work on weight id {weight_id}"
        )
        self._require(requests > 0, "an empty batch")
        self.phase = ReplicaPhase.DRAINING
        self.in_flight = requests

    def reserve(self, weight_id: int) -> None:
        """One more request of the same weights will come from another replica: the batch is not done before
        it has, or `finished`."""
        self._require(
            self.phase is ReplicaPhase.DRAINING and weight_id == self.weight_id,
            f"a move of weight id {weight_id} to this replica",
        )
        self.in_flight += 1

    def finished(self, weight_id: int | None = None) -> None:
        """A request of the batch, on `weight_id`, has its last token, is lost, or has moved away."""
        # it went on before all was done
        interrupted = self.phase in (ReplicaPhase.PULLING, ReplicaPhase.VERIFIED) and self.in_flight > 0
        self._require(self.phase is ReplicaPhase.DRAINING or interrupted, "the end of a request")
        self.in_flight -= 1
        if self.in_flight == 0 and not interrupted:
            self.phase = ReplicaPhase.OPEN
