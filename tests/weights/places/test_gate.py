"""A gate and a link to it over loopback, through a network that cuts connections, stalls and spoils bytes."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import zmq

from helpers.links.proxy import Proxy
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.dealer import connect_secured
from laminar_hpc.line.messages import gate as wire
from laminar_hpc.line.messages.places import GateAddress
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.links.meeting import LinkBroken
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.places import far_link
from laminar_hpc.weights.places import gate as gates
from laminar_hpc.weights.places.far_link import FarLink
from laminar_hpc.weights.places.gate import Gate
from laminar_hpc.weights.places.shipment import PlaceFeed, Shipment
from laminar_hpc.weights.relay.chain import Changes, WeightStream, receive_stream
from laminar_hpc.weights.slots import SlotReader, SlotWriter
from laminar_hpc.weights.stream import decode_header

TENSORS = [("a", (999, 1001), "bfloat16"), ("b", (7,), "bfloat16"), ("c", (5_000_000,), "bfloat16")]
SIZE = layout(TENSORS, 0, 0).data_bytes  # 12 MB, in two chunks and 92 pieces


class Home:
    """The trainer's place: slots, a gate, and a network before it."""

    def __init__(self, folder):
        self.writer = SlotWriter(str(folder), "run", 3, folder)
        self.reader = SlotReader(str(folder), "run")
        self.failed = []
        self.gate = Gate("127.0.0.1", "", self.reader, self.failed.append)
        self.proxy = Proxy(self.gate.address.port)
        self.newest = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
        self.weight_id = -1

    def publish(self, changed=0.01):
        """Returns the seconds that it took, which nobody else's reading may prolong."""
        began = time.monotonic()
        self.weight_id += 1
        units = self.newest.view(torch.int16)
        units[torch.rand(units.shape) < changed] ^= 1
        manifest = layout(TENSORS, self.weight_id, self.weight_id)
        for entry in manifest.tensors:
            part = self.newest[entry.offset : entry.offset + entry.nbytes]
            entry.sum_words, entry.sum_indexed = tensor_sums(part)
        self.writer.begin(manifest)[:SIZE] = self.newest.numpy()
        self.writer.commit(manifest)
        return time.monotonic() - began

    def close(self):
        self.proxy.close()
        self.gate.close()
        self.writer.close()
        assert self.failed == []


class Far:
    """A relay at another place: what it holds, and a link."""

    def __init__(self, home, port=None):
        self.address = msgspec.structs.replace(home.gate.address, port=port or home.proxy.port)
        self.id, self.bytes = None, None
        self.link = self.connect()

    def connect(self):
        return FarLink(self.address, 1, "relay 0", "elsewhere", lambda: self.id)

    def pull(self):
        """One publication, checked as a relay checks it; returns its share of the bytes on the wire."""
        manifest, chunk, base_id = decode_header(self.link.receive_bytes(idle_seconds=60))
        stream = WeightStream(manifest, torch.zeros(SIZE, dtype=torch.uint8), chunk)
        if base_id is not None:
            assert base_id == self.id
            stream.changes = Changes(base_id, self.bytes)
        receive_stream(self.link, stream)
        self.id, self.bytes = manifest.weight_id, stream.data
        return self.link.wire_bytes / SIZE


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path)
    yield made
    made.close()


@pytest.fixture
def far(home):
    made = Far(home)
    yield made
    made.link.close()


def during_a_pull(home, far, act):
    """Does `act` when a third of the pieces have passed; returns the pull's share."""

    def wait_and_act():
        until = time.monotonic() + 30
        while home.proxy.passed - before < SIZE / 3 and time.monotonic() < until:
            time.sleep(0.001)
        act()

    before = home.proxy.passed
    other = threading.Thread(target=wait_and_act)
    other.start()
    share = far.pull()
    other.join()
    return share


def test_the_first_copy_is_full_and_later_ones_are_changes(home, far):
    """What arrives has the sums that it left with (else `pull` fails), in a fraction of the bytes."""
    home.publish()
    assert 1.0 <= far.pull() < 1.001
    assert torch.equal(far.bytes, home.newest)
    home.publish()
    assert far.pull() < 0.03
    assert (far.id, torch.equal(far.bytes, home.newest)) == (1, True)
    home.publish(changed=1.0)
    assert far.pull() < 1.001  # changes never cost more than a copy


def test_a_place_that_falls_behind_skips_versions_and_delays_nobody(home, far):
    """While a shipment stands still, more publications than there are slots come and go; then the place gets
    the newest one, as changes to what it holds."""
    home.publish()
    far.pull()
    took = []

    def stand_still():
        home.proxy.stalled = True
        took.extend(home.publish(changed=0.001) for _ in range(5))
        home.proxy.stalled = False

    home.publish(changed=1.0)
    during_a_pull(home, far, stand_still)
    assert far.id == 1
    assert far.pull() < 0.05
    assert (far.id, torch.equal(far.bytes, home.newest)) == (6, True)
    assert max(took) < 5.0


def test_weights_that_are_replaced_while_a_shipment_is_made_leave_all_the_same(home):
    """Else a trainer that publishes faster than slots are compared would keep a place from ever getting
    any."""
    maker = ThreadPoolExecutor(1)
    feed = PlaceFeed("elsewhere", home.reader, maker, lambda: None)
    offered = []
    for held in (None, 0, 2):
        home.publish()
        assert feed.offer(held) is None
        maker.submit(int).result()  # when it is made
        home.publish()
        offered.append(feed.offer(held))
    maker.shutdown()
    assert [(each.weight_id, each.base_id) for each in offered] == [(0, None), (2, 0), (4, 2)]


def test_a_cut_costs_no_more_than_what_was_on_its_way(home, far):
    """After a cut in the middle what has come is not sent again."""
    home.publish()
    during_a_pull(home, far, home.proxy.reset)
    assert torch.equal(far.bytes, home.newest)
    on_its_way = wire.STREAMS * wire.AHEAD * wire.PIECE_BYTES
    assert home.proxy.passed < SIZE * 1.02 + on_its_way + 1e6


def test_a_spoilt_byte_is_refused_and_fetched_again(home, far):
    """Changed bytes on the way end a connection, not the publication, and never get into a slot."""
    home.publish()

    def spoil():
        home.proxy.garble = True

    during_a_pull(home, far, spoil)
    assert not home.proxy.garble, "nothing was spoilt"
    assert torch.equal(far.bytes, home.newest)


def test_a_new_gate_knows_what_a_place_holds_from_its_slots(home, far):
    """The relay with the gate has been replaced: what the place holds is in a slot, so changes go on."""
    home.publish()
    far.pull()
    home.publish()
    home.gate.close()
    home.gate = Gate("127.0.0.1", "", home.reader, home.failed.append)
    other = Far(home, home.gate.address.port)
    other.id, other.bytes = far.id, far.bytes
    assert other.pull() < 0.03
    assert torch.equal(other.bytes, home.newest)
    other.link.close()


def test_what_a_gate_has_given_up_breaks_the_link(home, monkeypatch):
    """A relay that was replaced at its place in the middle of a pull is told so, and links anew."""
    monkeypatch.setattr(far_link, "STREAMS", 4)  # so that most pieces have yet to be asked for
    home.publish()
    far, other = Far(home), Far(home, home.gate.address.port)

    def take_its_place():
        home.proxy.stalled = True
        home.publish()
        other.pull()
        other.pull()
        home.proxy.stalled = False

    with pytest.raises(LinkBroken, match="has given up what was on its way"):
        during_a_pull(home, far, take_its_place)
    far.link.close()
    other.link.close()


def test_close_ends_a_wait_at_once(home, far):
    """The main thread of a relay closes a link on which another one waits for weights."""
    ended = []

    def wait():
        far.link = far.connect()
        with pytest.raises(LinkBroken, match="was closed"):
            far.link.receive_bytes(idle_seconds=1e6)
        far.link.close()
        ended.append(True)

    far.link.close()
    first, waiting = far.link, threading.Thread(target=wait)
    waiting.start()
    while far.link is first:
        time.sleep(0.01)
    far.link.close()
    waiting.join(10)
    assert ended == [True]


def test_strangers_get_nothing(home, monkeypatch):
    """Without the keys that the controller gives there is no answer, whatever is sent, and who has them goes
    on; a relay that gets no answer says where it has tried."""
    home.publish()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    real = home.gate.address
    stranger = GateAddress(real.host, real.port, real.server_public, public, secret)
    monkeypatch.setattr(far_link, "MEET_SECONDS", 1.5)
    link = FarLink(stranger, 1, "relay 0", "elsewhere", lambda: None)
    with pytest.raises(LinkBroken, match=f"no answer from the gate of relay 0 at 127.0.0.1:{real.port}"):
        link.receive_bytes()
    link.close()
    plain = zmq.Context()
    socket = plain.socket(zmq.DEALER)
    socket.connect(f"tcp://{real.host}:{real.port}")
    socket.send(wire.encode(wire.Next("elsewhere", None, 0)))
    assert not socket.poll(500)
    plain.destroy(0)
    far = Far(home, real.port)
    assert far.pull() >= 1.0
    far.link.close()


@pytest.mark.parametrize("frame", [b"", b"nonsense", b"\xc1", wire.encode(wire.Nothing(0)), b"\x91" * 4000])
def test_nonsense_with_the_key_gets_no_answer(home, frame):
    """Nothing that is sent ends the gate."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    connect_secured(socket, home.gate.address)
    socket.send(frame)
    socket.send(wire.encode(wire.Fetch(10**9, -5)))
    assert socket.poll(10_000)
    assert wire.decode_reply(socket.recv_multipart()[0]) == wire.Gone(10**9, -5)
    context.destroy(0)


def test_a_question_waits_for_what_it_asks_for(home, monkeypatch):
    """Pieces of weights that come after it leave at once, over each connection that has asked for one; where
    none come, it is answered before the link takes the gate for gone."""
    monkeypatch.setattr(gates, "HELD_SECONDS", 1.0)
    context = zmq.Context()
    first, other = (context.socket(zmq.DEALER) for _ in range(2))
    for piece, socket in enumerate((first, other)):
        connect_secured(socket, home.gate.address)
        socket.send(wire.encode(wire.Next("elsewhere", None, piece)))
    for piece, socket in enumerate((first, other)):
        assert wire.decode_reply(socket.recv_multipart()[0]) == wire.Nothing(piece)
        socket.send(wire.encode(wire.Next("elsewhere", None, piece)))
        assert not socket.poll(100)
    home.publish()
    for piece, socket in enumerate((first, other)):
        reply, content = socket.recv_multipart()
        answer = wire.decode_reply(reply)
        assert (answer.piece, len(content)) == (piece, wire.piece_bytes(answer.size))
    other.send(wire.encode(wire.Next("elsewhere", None, 10**6)))
    assert other.recv_multipart()[1] == b""  # behind the last one
    context.destroy(0)


@pytest.mark.parametrize("size", [1, 16 << 10, 1_792_512, 1_792_513, SIZE, 10**9])
def test_pieces_are_all_of_a_shipment_and_of_a_small_one_enough_for_all_connections(size):
    """None is larger than a connection takes, and none is so small that it is mostly overhead."""
    piece, count = wire.piece_bytes(size), wire.pieces_of(size)
    assert (count - 1) * piece < size <= count * piece
    assert 16 << 10 <= piece <= wire.PIECE_BYTES
    assert count >= min(wire.STREAMS * wire.AHEAD, size >> 14) - 1


def test_the_pieces_of_a_shipment_are_its_parts():
    """Wherever one part ends and another begins."""
    data = torch.randint(0, 256, (3_000_000,), dtype=torch.uint8).numpy().data
    borders = [0, 8, 1_000_001, 1_000_001, 2_999_999, 3_000_000]
    parts = [data[begin:end] for begin, end in itertools.pairwise(borders)]
    made = Shipment(1, None, parts)
    assert b"".join(made.piece(number) for number in range(made.pieces)) == bytes(data)


def test_a_port_that_is_taken_is_one_line(home):
    """The message names the key."""
    with pytest.raises(LaminarError, match=r"cannot listen at 127.0.0.1:\d+ .*set relay.gate to a free port"):
        Gate("127.0.0.1", str(home.gate.address.port), home.reader, home.failed.append)


def test_behind_a_forwarding_address_the_relay_listens_at_its_own(home):
    """relay.gate may name an address that is no interface of this machine, as behind NAT."""
    gate = Gate("127.0.0.1", "192.0.2.7:0", home.reader, home.failed.append)
    assert gate.address.host == "192.0.2.7"
    gate.close()


def test_a_place_that_has_left_costs_no_memory(home, monkeypatch):
    """Its image goes when it asks for nothing any more, and what it had is known from a slot if it comes
    back."""
    left = Far(home)
    home.publish()
    left.pull()
    left.link.close()
    assert list(home.gate._feeds) == ["elsewhere"]
    monkeypatch.setattr(gates, "GONE_SECONDS", 0.5)
    until = time.monotonic() + 20
    while home.gate._feeds and time.monotonic() < until:
        time.sleep(0.05)
    assert not home.gate._feeds
    monkeypatch.setattr(gates, "GONE_SECONDS", 1200.0)
    left.link = left.connect()
    home.publish()
    assert left.pull() < 0.1  # changes to what it has
    left.link.close()
