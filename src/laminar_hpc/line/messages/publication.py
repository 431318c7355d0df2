"""Trainers and the controller: weight ids, and weights that have left."""

from laminar_hpc.line.messages.data import Message


class LaneSenders(Message):
    """The trainer rank that sends each lane; said after each Welcome, before any link is made. Without lanes
    rank 0 sends, and nothing is said."""

    ranks: list[int]


class NewWeightId(Message):
    """Asks for an id, once more after a Welcome; `request` tells the requests of a trainer apart."""

    step: int
    request: int = 0


class WeightId(Message):
    """Answer to NewWeightId; `relays` are to receive these weights, one from the other."""

    weight_id: int
    step: int
    relays: int = 1
    request: int = 0


class Published(Message):
    """The weights have left the trainer. `probe_logprobs`: its log-probs of the fixed probe at this id."""

    weight_id: int
    step: int
    stall_seconds: float  # in which the trainer stood still, without those of the probe
    probe_seconds: float
    seconds: float  # from the request of an id to the last byte
    bytes: int  # that left for relays, layout and sums included
    probe_logprobs: list[float]
    time: float
    full_bytes: int = 0  # that would have left in full
    changed: float | None = None  # fraction of elements, with relay.delta=auto and an id before
