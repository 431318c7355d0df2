"""KV caches of trajectories whose replica ends, and for which no other has room: a relay keeps them until a
replica takes the trajectory up (policies/moves.py, weights/relay/parking.py).

    controller --Park--> relay --Reserved--> controller --MoveOrder--> source --MoveReady--> controller
               --Keep--> relay --Parked--> controller
    taker --TakeUp--> controller --HandOn--> relay --HandedOn--> controller --TakenUp--> taker

A parked cache is named "RELAY:MOVE" in its trajectory's Partial."""

from laminar_hpc.line.messages.data import Message


class Park(Message):
    """To a relay: take the KV cache that this move brings. Answer: Reserved or MoveFailed."""

    move_id: str


class Keep(Message):
    """To the relay: the source has sent all that it sends. Answer: Parked."""

    move_id: str


class Parked(Message):
    """From the relay: so much of the KV cache is here and checked; 0 tokens: nothing of use."""

    move_id: str
    tokens: int
    bytes: int


class TakeUp(Message):
    """From a replica that goes on with the trajectory: its engine takes the KV cache at `address`; "" = it is
    not wanted. Answer, to an address: TakenUp."""

    parked: str
    address: str


class HandOn(Message):
    """To the relay: send what is kept to `address`, and forget it. Answer: HandedOn."""

    move_id: str
    address: str


class HandedOn(Message):
    """From the relay: so much has arrived there; 0 tokens: nothing, for this reason."""

    move_id: str
    tokens: int
    bytes: int
    reason: str


class TakenUp(Message):
    """To the replica: so much of the KV cache is in its engine's hands; 0 tokens: it is prefilled again."""

    parked: str
    tokens: int


class Unpark(Message):
    """To the relay: nobody wants this KV cache any more."""

    move_id: str


def parked_name(relay: int, move_id: str) -> str:
    """Of the KV cache that this move has brought to this relay."""
    return f"{relay}:{move_id}"


def parked_at(name: str) -> tuple[int, str]:
    """(relay, move) of a name; relay -1 for what is none."""
    first, _, move_id = name.partition(":")
    known = first.isascii() and first.isdecimal() and len(first) < 10 and len(move_id) < 64
    return (int(first), move_id) if known else (-1, "")
