"""The life of one move as a pure state machine: what the controller does next, whatever happens to source,
destination or network.

    RESERVE --reserved--> DETACH --ready--> IMPORT --imported--> COMMITTED
       '--------------------'------------------'--failed, lost, late--> ABORTED

A move without a source (its owner is dead) begins with its response already known, so it skips DETACH.

A trajectory that has to leave and has no room elsewhere parks: its KV cache goes to a relay, which keeps it.
Such a move is over when the source has sent all, and leaves the trajectory without an owner.

    RESERVE --reserved--> DETACH --ready--> COMMITTED

The owner changes in the one step from IMPORT to COMMITTED, after the destination has said that it holds the
trajectory; until then the source has it and goes on with it when the move is off. If the source dies once its
response so far is known (IMPORT), the move goes on; when such a move is called off the trajectory has no
owner any more. Every step gives the actions for the controller, in order.

    >>> move = Move("m", 7, 0, source=1, destination=2, weight_id=3, deadline=9.0)
    >>> move.reserved("tcp"), move.ready(), move.imported()
    ([<Action.ORDER: 'order'>], [<Action.IMPORT: 'import'>], [<Action.CHANGE_OWNER: 'change owner'>])
    >>> move.phase
    <MovePhase.COMMITTED: 'committed'>
"""

from dataclasses import dataclass
from enum import Enum

# of one trajectory: over the mean of its replica; tokens until its last KV has arrived
MORE_THAN_MEAN, DECODED_MEANWHILE = 1.25, 512


class MovePhase(Enum):
    """How far a move is."""

    RESERVE = "reserve"
    DETACH = "detach"
    IMPORT = "import"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Action(Enum):
    """What the controller does next."""

    ORDER = "order"  # the source: send, stop, say what there is
    IMPORT = "import"  # the destination: this is the response so far
    CHANGE_OWNER = "change owner"  # in the store; then tell both sides
    CALL_OFF = "call off"  # tell whoever of both sides is left
    ORPHAN = "orphan"  # the trajectory has no owner: try another replica, or start it again from its prompt
    PARK = "park"  # its response so far waits, its KV cache at the relay: tell the source, then as ORPHAN
    ANSWER = "answer"  # say again how it ended


@dataclass
class Move:
    """One trajectory's way from `source` (None = its owner is dead) to `destination` (None once it is dead),
    or to where it parks. `deadline`: for the present phase, seconds."""

    move_id: str
    trajectory_id: int
    attempt: int  # of the owner that it leaves
    source: int | None
    destination: int | None
    weight_id: int
    deadline: float
    phase: MovePhase = MovePhase.RESERVE
    address: str = ""
    reason: str = ""  # why it was called off
    relay: int | None = None  # that keeps the KV cache, where there is no destination

    @property
    def over(self) -> bool:
        return self.phase in (MovePhase.COMMITTED, MovePhase.ABORTED)

    def reserved(self, address: str) -> list[Action]:
        if self.over:
            return [Action.ANSWER]
        if self.phase is not MovePhase.RESERVE:
            return []  # said again while the source is at work
        self.address = address
        if self.source is None:
            self.phase = MovePhase.IMPORT
            return [Action.IMPORT]
        self.phase = MovePhase.DETACH
        return [Action.ORDER]

    def ready(self) -> list[Action]:
        """The source stands still and has said what there is."""
        if self.over:
            return [Action.ANSWER]
        if self.phase is not MovePhase.DETACH:
            return []
        if self.relay is not None:
            self.phase = MovePhase.COMMITTED
            return [Action.PARK]
        self.phase = MovePhase.IMPORT
        return [Action.IMPORT]

    def imported(self) -> list[Action]:
        if self.over:
            return [Action.ANSWER]
        if self.phase is not MovePhase.IMPORT:
            return []
        self.phase = MovePhase.COMMITTED
        return [Action.CHANGE_OWNER]

    def call_off(self, reason: str) -> list[Action]:
        """Either side cannot do its part, the trajectory has ended, or the deadline has passed."""
        if self.over:
            return []
        self.phase = MovePhase.ABORTED
        self.reason = reason
        return [Action.CALL_OFF] + ([Action.ORPHAN] if self.source is None else [])

    def replica_lost(self, replica: int) -> list[Action]:
        """A replica has died or left."""
        if self.over or replica not in (self.source, self.destination):
            return []
        if replica == self.source:
            self.source = None
            if self.phase is MovePhase.IMPORT:
                return []  # the destination has, or gets, all that is needed
            self.phase = MovePhase.ABORTED
            self.reason = "its source is gone"
            return [Action.CALL_OFF]  # the trajectory is among those that the source leaves behind
        self.destination = None
        return self.call_off("its destination is gone")


def room(prompt_tokens: int, response_tokens_max: int, kv_tokens: int, requests: int) -> int:
    """Tokens to reserve for one of `requests` trajectories that hold `kv_tokens` together. What turns out not
    to fit is prefilled again; what is over goes back at the import.

    >>> room(100, 30_000, 80_000, 10), room(100, 256, 80_000, 10)
    (10612, 356)
    """
    mean = kv_tokens / max(1, requests)
    return prompt_tokens + min(response_tokens_max, int(MORE_THAN_MEAN * mean) + DECODED_MEANWHILE)
