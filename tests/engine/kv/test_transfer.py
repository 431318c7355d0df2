"""A part's way from pool to pool: both transports carry the same bits, and what does not belong there is
refused in one line."""

import json
import time
from pathlib import Path

import pytest
import torch
import zmq

from helpers.links.pools import make, same, slots_of
from laminar_hpc.engine.kv import device, transfer
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import PartHeader, encode_header
from laminar_hpc.engine.kv.inbox import Expected, KvInbox
from laminar_hpc.engine.kv.pool import gather
from laminar_hpc.engine.kv.shm import ShmOffer, Taken
from laminar_hpc.engine.kv.transfer import chunk_bytes, send_part

SHAPE = {"layers": 4, "heads": 4, "head_dim": 64, "pages": 700}
TOKENS = list(range(1000, 1600))


class Move:
    """Two pools, and an inbox for 600 tokens of weight id 3."""

    def __init__(self, tmp_path, machine: str) -> None:
        self.source, self.target = make(**SHAPE, seed=1), make(**SHAPE, seed=2)
        self.ours, self.theirs = slots_of(600, pages=700, seed=3), slots_of(600, pages=700, seed=4)
        self.folder, self.machine = str(tmp_path), machine
        self.inbox = KvInbox(Expected("model", 3, self.target, self.theirs), "127.0.0.1", "here")

    def header(self, first=0, end=600, last=True, fingerprint="model", weight_id=3, pool=None) -> PartHeader:
        size = chunk_bytes(self.inbox.address, self.machine)
        return PartHeader.of(
            fingerprint, weight_id, (pool or self.source).shape, TOKENS[first:end], size, first, last
        )

    def send(self, header: PartHeader, pool=None, seconds=20.0) -> None:
        slots = self.ours[header.first : header.first + header.tokens]
        send_part(
            self.inbox.address,
            header,
            pool or self.source,
            slots,
            machine=self.machine,
            folder=self.folder,
            seconds=seconds,
        )


@pytest.fixture(params=["here", "elsewhere"], ids=["shm", "tcp"])
def move(request, tmp_path):
    move = Move(tmp_path, request.param)
    yield move
    move.inbox.close()
    assert move.inbox.ended(5)


def test_two_parts_arrive_bit_by_bit(move):
    """Promise: the snapshot and the rest make the whole; only then is it complete; nothing is left in shared
    memory."""
    move.send(move.header(0, 320, last=False))
    assert move.inbox.tokens == TOKENS[:320] and not move.inbox.complete
    move.send(move.header(320))
    assert move.inbox.tokens == TOKENS and move.inbox.complete
    assert same(move.source, move.ours, move.target, move.theirs)
    assert list(Path(move.folder).iterdir()) == []


def test_a_part_sent_anew_replaces_the_old_one(move):
    """Promise: a request that was retracted is sent from its start again, and what came before no longer
    counts."""
    move.send(move.header(0, 320, last=False))
    move.send(move.header(0, 100, last=False))
    assert move.inbox.tokens == TOKENS[:100]
    move.send(move.header(100))
    assert move.inbox.complete and same(move.source, move.ours, move.target, move.theirs)


def test_an_inbox_is_closed_while_its_offer_ends(tmp_path):
    """The inbox's thread has closed the offer when the scheduler's refuses it: pages are given back all the
    same."""
    move = Move(tmp_path, "here")
    with ShmOffer(move.header(), tmp_path) as offer, Taken(offer.path) as taken:
        pass
    move.inbox._taken = taken
    move.inbox.close()
    assert move.inbox.ended(20)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": "other"}, "it is of model other, this engine serves model"),
        ({"weight_id": 4}, "it is of weight id 4, this engine serves 3"),
        ({"first": 10}, "tokens 10 to 600 do not fit where 0 tokens are there and 600 reserved"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_destination(move, change, says):
    """Promise: the source hears the destination's own line at once, and the reservation takes nothing
    more."""
    start = time.monotonic()
    for header in (move.header(**change), move.header()):
        with pytest.raises(KvRefused, match=says):
            move.send(header)
    assert time.monotonic() - start < 5 and not move.inbox.complete


def test_another_pool_and_too_many_tokens_are_refused(move):
    """Promise: KV of another shape, and more than was reserved, never reach the pool."""
    other = make(layers=3, heads=4, head_dim=64, pages=700)
    with pytest.raises(KvRefused, match=r"this engine's pool is Shape"):
        move.send(move.header(pool=other), other)
    small = KvInbox(Expected("model", 3, move.target, move.theirs[:599]), "127.0.0.1", "here")
    move.inbox.close()
    move.inbox = small
    with pytest.raises(
        KvRefused, match="tokens 0 to 600 do not fit where 0 tokens are there and 599 reserved"
    ):
        move.send(move.header())


def test_a_damaged_chunk_is_refused(tmp_path):
    """Promise: a bit that changed on the way, a foreign chunk and a chunk sent twice are refused in one
    line."""
    for harm in ("bit", "number", "twice"):
        move = Move(tmp_path, "elsewhere")
        header = move.header()
        records, stride = (
            gather(move.source, move.ours, header.chunk_bytes, 1),
            move.source.shape.record_bytes(header.chunk_bytes),
        )
        chunks = [bytearray(records[i * stride : (i + 1) * stride].numpy().tobytes()) for i in range(2)]
        if harm == "bit":
            chunks[0][4000] ^= 1
        elif harm == "number":
            chunks[0][4] = 77
        else:
            chunks[1] = chunks[0]
        with (
            zmq.Context() as context,
            transfer._connect(context, transfer.decode_address(move.inbox.address), 5.0) as stream,
        ):
            stream.linger = 0
            stream.send_multipart([b"part", encode_header(header)])
            assert stream.poll(5000) and stream.recv_multipart() == [b"go"]
            for chunk in chunks:
                stream.send_multipart([b"rows", bytes(chunk)])
            assert stream.poll(5000)
            kind, line = stream.recv_multipart()
        assert kind == b"no" and b"refused: it is not one of those expected" in line and b"\n" not in line
        assert not move.inbox.complete
        move.inbox.close()


def test_only_the_holder_of_the_address_may_send(tmp_path):
    """Promise: without the address's secret key nothing is taken; an address that is none is refused."""
    move = Move(tmp_path, "elsewhere")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    forged = json.dumps(json.loads(move.inbox.address) | {"client_public": public, "client_secret": secret})
    genuine, move.inbox.address = move.inbox.address, forged
    with pytest.raises(KvRefused, match=r"said nothing for 0\.5 s"):
        move.send(move.header(), seconds=0.5)
    move.inbox.address = genuine
    move.send(move.header())
    assert move.inbox.complete
    with pytest.raises(KvRefused, match="is not an address of a reserved engine"):
        send_part("nonsense", move.header(), move.source, move.ours, machine="here", folder=str(tmp_path))
    move.inbox.close()


def test_a_destination_that_has_left(move):
    """Promise: the wait for a destination that gave the move up is bounded, and says on whom it waited."""
    move.inbox.close()
    assert move.inbox.ended(5)
    with pytest.raises(
        KvRefused, match=r"the destination at 127\.0\.0\.1:\d+ (said|took) nothing for 0\.3 s"
    ):
        move.send(move.header(), seconds=0.3)


def test_slots_not_named_stay_as_they_were(move):
    """Promise: a move writes the reserved slots and no other."""
    untouched = torch.ones(len(move.target.tensors[0]), dtype=torch.bool)
    untouched[move.theirs] = False
    before = [tensor.view(torch.int16)[untouched].clone() for tensor in move.target.tensors]
    move.send(move.header())
    assert all(
        torch.equal(t.view(torch.int16)[untouched], old)
        for t, old in zip(move.target.tensors, before, strict=True)
    )


class Pretended:
    """CUDA IPC within this process, of rows in host memory: `takes` and `gives` are what CUDA says to either
    end."""

    def __init__(self, monkeypatch, gives=None, takes=None) -> None:
        self.shared, self.taken, self.gives, self.takes = {}, 0, gives, takes
        monkeypatch.setattr(device, "can_share", lambda pool: True)
        monkeypatch.setattr(device, "on_gpu", lambda pool: True)
        monkeypatch.setattr(device, "share", self.share)
        monkeypatch.setattr(device, "take_shared", self.take)

    def share(self, pool, slots, after):
        """In two pieces, of which the second has all rows."""
        if self.gives:
            raise self.gives
        try:
            for number in range(2):
                ticket = device.Ticket(bytes([len(self.shared)]) * 64, len(slots), number, b"")
                self.shared[ticket.handle] = [tensor[slots] for tensor in pool.tensors]
                yield ticket
        finally:
            self.shared.clear()

    def take(self, ticket, mapped, pool, slots, after):
        if self.takes:
            raise self.takes
        for tensor, rows in zip(pool.tensors, self.shared[ticket.handle], strict=True):
            tensor[slots] = rows
        self.taken += ticket.number
        return ticket.number == 1


def test_rows_of_a_gpu_pass_through_host_memory(move, monkeypatch):
    """Promise: what stands for a GPU's pool in host memory carries every part, over both transports."""
    monkeypatch.setattr(device, "on_gpu", lambda pool: True)
    move.send(move.header(0, 320, last=False))
    move.send(move.header(320))
    assert move.inbox.complete and same(move.source, move.ours, move.target, move.theirs)


@pytest.mark.parametrize(
    ("gives", "takes"),
    [
        (None, None),
        (RuntimeError("CUDA error 2: out of memory"), None),
        (None, RuntimeError("CUDA error 217: no peer")),
    ],
)
def test_gpus_that_cannot_share_rows_go_through_the_host(tmp_path, monkeypatch, gives, takes):
    """Promise: between processes of one machine rows stay on the GPU, and what CUDA refuses at either end
    costs a way, not the move."""
    cuda = Pretended(monkeypatch, gives, takes)
    move = Move(tmp_path, "here")
    move.send(move.header(0, 320, last=False))
    move.send(move.header(320))
    assert move.inbox.complete and same(move.source, move.ours, move.target, move.theirs)
    assert cuda.taken == (0 if gives or takes else 2) and not cuda.shared and not list(tmp_path.iterdir())
    move.inbox.close()
    assert move.inbox.ended(5)


def test_shared_rows_are_refused_and_other_machines_get_none(tmp_path, monkeypatch):
    """Promise: a wrong sum, or a ticket that is none, ends the move with the destination's line; the rows are
    let go in any case."""
    cuda = Pretended(monkeypatch, takes=KvRefused("KV chunk 2 refused: its checksum differs"))
    for machine, kept in (("here", False), ("elsewhere", True)):
        move = Move(tmp_path, machine)
        if kept:
            move.send(move.header())
        else:
            with pytest.raises(KvRefused, match="KV chunk 2 refused: its checksum differs"):
                move.send(move.header())
        assert move.inbox.complete == kept and not cuda.shared
        move.inbox.close()
    move = Move(tmp_path, "here")
    with (
        zmq.Context() as context,
        transfer._connect(context, transfer.decode_address(move.inbox.address), 5.0) as stream,
    ):
        stream.linger = 0
        stream.send_multipart([b"part", encode_header(move.header())])
        assert stream.poll(5000) and stream.recv_multipart() == [b"go"]
        stream.send_multipart([b"gpu", b"no ticket"])
        assert stream.poll(5000)
        kind, line = stream.recv_multipart()
    assert kind == b"no" and b"\n" not in line
    move.inbox.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), RuntimeError()])
def test_a_gpu_that_fails_at_the_destination_is_answered(move, monkeypatch, error):
    """Promise: the source hears at once that the destination has failed, and why, instead of waiting until
    its time is over; the destination's thread goes on and refuses the rest."""

    def fails(*_):
        raise error

    monkeypatch.setattr(device, "on_gpu", lambda pool: pool is move.target)
    monkeypatch.setattr(device.Stage, "of", fails)
    began = time.monotonic()
    says = "CUDA out of memory.$" if str(error) else "RuntimeError$"
    for _ in range(2):
        with pytest.raises(KvRefused, match=f"KV move failed at its destination: {says}"):
            move.send(move.header(), seconds=20.0)
    assert time.monotonic() - began < 15 and not move.inbox.ended()
