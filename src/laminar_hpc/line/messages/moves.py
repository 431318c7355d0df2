"""Moves of trajectories between rollouts: what the controller and the two replicas say; policies/moves.py has
the order. And what follows a trajectory that moved while it waited for a tool."""

from laminar_hpc.line.messages.data import Message, Partial, PromptGroup


class Reserve(Message):
    """To the destination: make room for this trajectory, and do not pull. Answer: Reserved or MoveFailed."""

    move_id: str
    trajectory_id: int
    group: PromptGroup  # without samples
    weight_id: int
    weight_step: int
    tokens: int  # room for its KV cache
    kv: bool  # the KV cache comes too; false = it is prefilled again
    temperature: float
    max_response_tokens: int


class Reserved(Message):
    """`address`: where the destination's engine takes the KV cache; empty = nowhere. Said until answered."""

    move_id: str
    address: str


class MoveOrder(Message):
    """To the source: send the KV to `address` (empty = none), then stop. Answer: MoveReady or MoveFailed."""

    move_id: str
    trajectory_id: int
    attempt: int
    address: str


class MoveReady(Message):
    """From the source: the request stands still and all is sent. Said until MoveCommit or MoveAbort comes.
    `siblings`: what the destination may guess from, see rollout/siblings.py."""

    move_id: str
    partial: Partial
    siblings: bytes = b""


class Import(Message):
    """To the destination: this is what you have received. Answer: Imported."""

    move_id: str
    partial: Partial
    siblings: bytes = b""  # as in MoveReady


class Imported(Message):
    """The destination has it for good, and of its KV cache `prefix_tokens`. Said again until MoveCommit or
    MoveAbort comes."""

    move_id: str
    prefix_tokens: int


class MoveCommit(Message):
    """The destination owns the trajectory now, under `attempt`: it goes on there; the source lets go."""

    move_id: str
    attempt: int


class MoveAbort(Message):
    """The move is off: the source goes on with its request, the destination lets go."""

    move_id: str
    reason: str


class MoveFailed(Message):
    """From either side: it cannot do what it was asked, and goes on as if it had not been."""

    move_id: str
    reason: str


class Answer(Message):
    """What came of the calls of a trajectory that has moved while they were made. From the replica that made
    them to the controller, and from it to whoever has the trajectory by now. `name`: what its Partial awaits;
    `tokens`: int32, what stands behind its turn. `failed`, `seconds`: of the calls, how many, and their time.
    `error`: there will be no answer; `failed_environment`: because that has failed."""

    trajectory_id: int
    name: str
    tokens: bytes = b""
    failed: int = 0
    seconds: float = 0.0
    error: str = ""
    failed_environment: bool = False
