"""All roles and the controller: joining, signs of life, failures, leaving."""

from typing import Annotated

import msgspec

from laminar_hpc.messages.data import Message, ReplicaLoad

# what a decoder lets pass: no number that a table or the system would stumble over
Index = Annotated[int, msgspec.Meta(ge=0, lt=65_536)]
ProcessId = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]


class Hello(Message):
    """First message of a worker. `incarnation` differs after a restart; `machine` names the host whose shared
    memory it sees."""

    role: str
    index: Index
    incarnation: str
    pid: ProcessId
    machine: str


class Welcome(Message):
    """Answer to Hello: the state to join with.

    received: int = 0
