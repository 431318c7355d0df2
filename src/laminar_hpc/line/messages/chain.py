"""Trainers, relays and the controller: the chain's links, each made in an epoch of its own."""

from laminar_hpc.line.messages.data import Message


class EpochProposed(Message):
    """To the trainer rank of a lane or a relay: open a store and link to `relays[0]`, behind which the others
    stand in chain order.

    The link takes the place of an earlier one to the same side. Epochs of lane l of L leave l when divided by
    L. `resend`: none of these relays holds the newest weights, so what was sent last must be sent again.
    """

    epoch: int
    relays: list[int]
    resend: bool = True


class StoreOpened(Message):
    """From the sending end of a link: its store listens here."""

    epoch: int
    host: str
    port: int


class JoinEpoch(Message):
    """To the receiving end of a link: the sending one, `peer`, waits at this store."""

    epoch: int
    host: str
    port: int
    peer: str


class SendAgain(Message):
    """To a relay: send your newest weights over this epoch's link, for `relays` behind it that miss them."""

    epoch: int
    relays: int


class CutLink(Message):
    """To a relay: the sender over this epoch's link is replaced. Nothing that still comes may be seen."""

    epoch: int


class LinkDown(Message):
    """From the trainer or a relay: this epoch's link broke. The controller makes another, around the lost."""

    epoch: int
    text: str


class RelayHas(Message):
    """A relay holds these weights, or its lane's part of them, with equal sums. `passed_on`: the epoch of the
    link that they went on over, if they did. `complete`: so do the other lanes of its machine, whose rollouts
    may load them.

    `bytes` 0: it has had them since before it was taken for dead. `wire_bytes`: that came for them from
    another place.
    """

    weight_id: int
    weight_step: int
    bytes: int
    seconds: float
    time: float
    passed_on: int | None = None
    complete: bool = True
    wire_bytes: int | None = None
