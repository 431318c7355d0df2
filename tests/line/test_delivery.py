"""The delivery protocol, with no socket: whatever a network and a controller's deaths do, each message of
each kind is taken once and in order."""

import random
import typing
import zlib
from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar_hpc.line.delivery import (
    WINDOW_BYTES,
    WINDOW_FRAMES,
    DeliveryError,
    Header,
    Receiver,
    Sender,
    decode_header,
    encode_header,
)
from laminar_hpc.line.messages.membership import Hello, Ping, Pong, Rejoin, Welcome
from laminar_hpc.line.messages.rollouts import Scored
from laminar_hpc.line.messages.wire import MESSAGES, decode, encode
from laminar_hpc.line.parcel import next_parcel, unpack
from laminar_hpc.line.spool import Spool, SpoolFull

OUTSIDE = (Hello, Welcome, Ping, Pong, Rejoin)  # travel in no stream
EXAMPLES = {int: 1, float: 0.5, str: "x", bytes: b"four", bool: True, list: [], dict: {}}


def example(kind: type) -> object:
    """A value of this type, with its required fields only."""
    origin = typing.get_origin(kind) or kind
    if origin is typing.Annotated:
        return example(typing.get_args(kind)[0])
    if origin in EXAMPLES:
        return EXAMPLES[origin]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(example(field.type) for field in msgspec.structs.fields(kind) if field.required))
    if origin is tuple:
        return tuple(example(part) for part in typing.get_args(kind))
    return example(typing.get_args(kind)[0])  # a union


KINDS = [kind for kind in MESSAGES if kind not in OUTSIDE]
FRAMES = [encode(example(kind)) for kind in KINDS]


def test_every_kind_is_among_the_examples() -> None:
    """The harness below sends all messages that travel in streams."""
    assert {type(decode(frame)) for frame in FRAMES} == set(KINDS) and len(KINDS) > 35


Frame = tuple[Header, bytes]


class World:
    """A worker and its controller, as channel and hub drive the two machines, and the frames between them."""

    def __init__(self) -> None:
        self.up: list[Frame] = []
        self.down: list[Frame] = []
        self.said_up: list[bytes] = []
        self.stored: list[bytes] = []  # with `received`, what survives the controller
        self.received = 0
        self.sessions = 0
        self.said_down: dict[str, list[bytes]] = {}
        self.heard_down: dict[str, list[bytes]] = {}
        self.now = 0.0
        self.worker_out, self.worker_in, self.session = Sender(Spool()), Receiver(), ""
        self.start_controller()

    # ---- the controller

    def start_controller(self) -> None:
        """Also after a death: only what was stored is known."""
        self.control_in, self.fresh = Receiver(self.received), list[bytes]()
        self.control_out: Sender | None = None
        self.open, self.joining = "", True

    def controller_hears(self, header: Header, frame: bytes) -> None:
        if frame == b"hello":
            if not self.open:
                self.sessions += 1
                self.open = f"s{self.sessions:09}"
                self.control_out = Sender(Spool())
                self.said_down[self.open] = []
            self.commit()
            self.down.append((self.head_down(0), b"welcome %d" % self.received))
            return
        if not self.open:
            if not header.seq:
                self.down.append((self.head_down(0), b"rejoin"))
            return
        assert self.control_out is not None
        if header.session == self.open:
            self.control_out.acknowledged(header.ack)
            if header.again:
                self.control_out.rewind()
        if header.seq and (new := self.control_in.take(header.seq, header.messages)):
            self.fresh += unpack(header, frame)[-new:]
        elif self.control_in.misses(max(header.seq, header.sent if not header.seq else 0), self.now):
            self.down.append((self.head_down(0, True), b""))

    def commit(self) -> None:
        self.stored += self.fresh
        self.fresh.clear()
        self.received = self.control_in.received
        if self.open:
            self.down.append((self.head_down(0), b""))

    def head_down(self, seq: int, again: bool = False) -> Header:
        sent = self.control_out.sent if self.control_out else 0
        return Header(self.open, seq, sent, self.received, again)

    def controller_says(self, frame: bytes) -> None:
        if self.open and self.control_out is not None:
            self.control_out.push(frame)
            self.said_down[self.open].append(frame)

    # ---- the worker

    def worker_says(self, frame: bytes) -> None:
        self.worker_out.push(frame)
        self.said_up.append(frame)

    def head_up(self, seq: int, again: bool = False) -> Header:
        return Header(self.session, seq, self.worker_out.sent, self.worker_in.received, again)

    def worker_hears(self, header: Header, frame: bytes) -> None:
        self.worker_out.acknowledged(header.ack)
        if frame.startswith(b"welcome"):
            if header.session > self.session:  # a Welcome overtakes no other
                self.worker_out.resume(int(frame.split()[1]))
                self.session, self.worker_in = header.session, Receiver()
                self.heard_down[self.session] = []
            self.joining = False
            return
        if header.seq == 0 and header.session > self.session:
            self.joining = True
        if frame == b"rejoin":
            self.joining = True
            return
        if header.again:
            self.worker_out.rewind()
        if header.session != self.session:
            return
        if header.seq and (new := self.worker_in.take(header.seq, header.messages)):
            self.heard_down[self.session] += unpack(header, frame)[-new:]
        elif self.worker_in.misses(max(header.seq, header.sent if not header.seq else 0), self.now):
            self.up.append((self.head_up(0, True), b""))

    # ---- time and the network

    def tick(self) -> None:
        """Both put on the wire what they may, every other time in parcels, and ping."""
        self.now += 1.0
        packs = self.now % 2 == 1.0
        if self.joining:
            self.up.append((self.head_up(0), b"hello"))
        else:
            while due := next_parcel(self.worker_out, packs):
                self.worker_out.advance(due.last)
                self.up.append((replace(self.head_up(due.last), packed=due.packed), due.payload))
        self.up.append((self.head_up(0), b""))
        if self.control_out is not None:
            while due := next_parcel(self.control_out, packs):
                self.control_out.advance(due.last)
                self.down.append((replace(self.head_down(due.last), packed=due.packed), due.payload))
            self.down.append((self.head_down(0), b""))

    def deliver(self, which: str, place: int, keep: bool = False) -> None:
        queue = self.up if which == "up" else self.down
        if queue:
            welcomes = (i for i, (_, frame) in enumerate(queue) if frame.startswith(b"welcome"))
            place = min(place % len(queue), next(welcomes, len(queue)))  # which nothing overtakes
            header, frame = queue[place] if keep else queue.pop(place)
            header = decode_header(encode_header(header))
            (self.controller_hears if which == "up" else self.worker_hears)(header, frame)

    def settle(self) -> None:
        """A whole network from here on."""
        for _ in range(40):
            while self.up or self.down:
                self.deliver("up", 0)
                self.deliver("down", 0)
            self.commit()
            self.tick()

    def check(self) -> None:
        """Nothing was taken twice or out of order, whatever is still under way."""
        assert self.stored + self.fresh == self.said_up[: len(self.stored) + len(self.fresh)]
        for session, heard in self.heard_down.items():
            assert heard == self.said_down[session][: len(heard)]


WEIGHTS_OF_ACTS = {
    "say_up": 6,
    "say_down": 6,
    "tick": 5,
    "take_up": 14,
    "take_down": 14,
    "double": 3,
    "drop": 5,
    "commit": 3,
    "flow": 2,
    "die": 1,  # the controller, and the next one starts over its store
    "cut": 1,
    "forget": 1,  # the controller takes the worker for dead
}
ACTS, WEIGHTS = list(WEIGHTS_OF_ACTS), list(WEIGHTS_OF_ACTS.values())


def play(world: World, act: str, number: int) -> None:
    frame = FRAMES[number % len(FRAMES)]
    which = ("up", "down")[number % 2]
    if act == "say_up":
        world.worker_says(frame)
    elif act == "say_down":
        world.controller_says(frame)
    elif act == "tick":
        world.tick()
    elif act.startswith("take"):
        world.deliver(act.removeprefix("take_"), number if number % 3 == 0 else 0)
    elif act == "double":
        world.deliver(which, number, keep=True)
    elif act == "drop":
        queue = world.up if which == "up" else world.down
        if queue:
            queue.pop(number % len(queue))
    elif act == "commit":
        world.commit()
    elif act == "die":
        world.start_controller()
    elif act == "forget":
        world.commit()
        world.open, world.control_out, world.joining = "", None, True
    elif act == "cut":
        world.up.clear()
        world.down.clear()
    else:
        for _ in range(number % 20):
            world.deliver("up", 0)
            world.deliver("down", 0)


def finish(world: World) -> None:
    world.check()
    world.settle()
    assert world.stored == world.said_up and world.worker_out.idle
    assert not world.joining and world.heard_down[world.session] == world.said_down[world.open]
    world.check()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 10_000)), max_size=120))
def test_once_and_in_order_by_any_history(history: list[tuple[str, int]]) -> None:
    """Promise: docs/promises.md#delivered-once."""
    world = World()
    for act, number in history:
        play(world, act, number)
    finish(world)


def test_once_and_in_order_over_long_histories() -> None:
    """As above, 60 histories of 600 acts in which all kinds are sent, and the controller dies again and
    again."""
    kinds, deaths = set(), 0
    for seed in range(60):
        draw, world = random.Random(seed), World()
        for act in draw.choices(ACTS, WEIGHTS, k=600):
            play(world, act, draw.randrange(10_000))
            deaths += act == "die"
        finish(world)
        kinds |= {type(decode(frame)) for frame in world.stored}
    assert kinds == set(KINDS) and deaths > 100


def test_no_more_than_the_window_is_on_the_wire() -> None:
    """By number and by bytes; one frame larger than the window goes alone."""
    sender = Sender(Spool())
    for _ in range(2 * WINDOW_FRAMES):
        sender.push(b"x")
    numbers = []
    while due := sender.peek():
        sender.advance(due[0])
        numbers.append(due[0])
    assert numbers == list(range(1, WINDOW_FRAMES + 1))
    sender.acknowledged(10)
    assert sender.peek() == (WINDOW_FRAMES + 1, b"x")
    large = Sender(Spool())
    for _ in range(2):
        large.push(bytes(WINDOW_BYTES + 1))
    assert large.peek() is not None
    large.advance(1)
    assert large.peek() is None


def test_what_no_sender_could_say_is_refused() -> None:
    """Promise: a number far ahead, an acknowledgement of what was not sent, a store that has forgotten, and
    what is no header are errors with a reason."""
    with pytest.raises(DeliveryError, match="message 1026 where 2 is due"):
        Receiver(1).take(1026)
    sender = Sender(Spool())
    sender.push(b"x")
    sender.peek()
    with pytest.raises(DeliveryError, match="acknowledges message 2 of 1"):
        sender.acknowledged(2)
    with pytest.raises(DeliveryError, match="another process has the same name"):
        sender.resume(7)
    sender.acknowledged(1)
    with pytest.raises(DeliveryError, match="knows messages up to 0, but 1 were acknowledged"):
        sender.resume(0)
    deep = b"\x95" + b"\x81\xa1a" * 50_000 + b"\xc0"
    for frame in (b"", b"\xff", b"\xc0", encode(Ping()), deep, encode_header(Header("s", -1, 0, 0))):
        with pytest.raises(DeliveryError, match="header"):
            decode_header(frame)


def test_a_parcel_holds_what_waits_in_a_fraction_of_the_bytes() -> None:
    """As many messages as it says; a small one goes as it is, and so does each for who is near."""
    sender, scored = (
        Sender(Spool()),
        [encode(Scored(i, 1, 0.5, {}, "", 1e9)) for i in range(99)],
    )
    for frame in scored:
        sender.push(frame)
    assert next_parcel(sender, packs=False) == (1, 0, scored[0])
    parcel = next_parcel(sender, packs=True)
    header = Header("s", parcel.last, parcel.last, 0, packed=parcel.packed)
    assert (parcel.last, parcel.packed, unpack(header, parcel.payload)) == (99, 99, scored)
    assert len(parcel.payload) < sum(map(len, scored)) / 4
    sender.advance(98)
    assert next_parcel(sender, packs=True) == (99, 0, scored[98])
    sender.advance(99)
    assert next_parcel(sender, packs=True) is None
    for payload in (b"", b"nonsense", parcel.payload[:-9], zlib.compress(b"\x91\xc4\x00")):
        with pytest.raises(DeliveryError, match=r"99 messages that cannot be unpacked|1 messages, not 99"):
            unpack(header, payload)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=60)), max_size=80))
def test_a_spool_is_a_queue(acts: list[bytes | None]) -> None:
    """What goes in comes out in order, whether it waits in memory or in files; None takes one out."""
    spool, model = Spool(memory=100), deque[bytes]()
    for frame in acts:
        if frame is not None:
            spool.append(frame)
            model.append(frame)
        elif model:
            assert spool.popleft() == model.popleft()
        assert len(spool) == len(model)
    assert [spool.popleft() for _ in range(len(spool))] == list(model)
    assert not spool.on_disk


def test_a_full_spool_says_so() -> None:
    """The limit counts what waits on the disk."""
    spool = Spool(memory=10, limit=100)
    with pytest.raises(SpoolFull, match=r"^\d+ messages of .* wait to be sent and the other side takes none"):
        for _ in range(100):
            spool.append(b"0123456789")
    assert len(spool) == 11
