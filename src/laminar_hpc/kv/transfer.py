"""One part of a move, from a source's pool into a destination's: through shared memory where both see the same, else over TCP.

    inbox = Inbox(...)                                      destination: listens, in a thread of its own; inbox.address goes to the source
    send_part(inbox.address, header, pool, slots, ...)      source: returns when all of the part is there and checked, else raises KvRefused

Both sides first meet over TCP: a ROUTER here, DEALERs there, with CURVE keys made for this one move (ZeroMQ's authenticated encryption, as
between the roles), of which the address holds the source's pair. So whoever holds the address may send, and nobody else.

    source -> "part", header        "go" or "no", reason <- destination
    source -> "shm", path           the file of shm.py; or for each chunk, over the streams in turn: "rows", record as of frames.py
                                    "ok" or "no", reason <- destination
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
import zmq
from zmq.utils import z85

from laminar_hpc.kv.errors import KvRefused
from laminar_hpc.kv.frames import Header, Shape, check_fits, decode_header, encode_header
from laminar_hpc.kv.native import extension
from laminar_hpc.kv.pool import NATIVE_PLAN, Pool, aligned
from laminar_hpc.kv.shm import CHUNK_BYTES, WAIT_SECONDS, Offer, Taken

STREAMS = 4  # TCP connections of a move; one seldom fills a fast network, and each is encrypted by another thread
TCP_CHUNK_BYTES = 1 << 19  # a message's overhead is small beside it
QUEUED = 8  # chunks on their way per stream: bounds the memory of a move
POLL_SECONDS = 0.05


class Place(msgspec.Struct, frozen=True):
    """What an address says."""

    host: str
    port: int
    machine: str  # as of cluster.processes.machine_name: whose shared memory the destination sees
    server_public: str
    client_public: str
    client_secret: str


def decode_address(address: str) -> Place:
    try:
        return msgspec.json.decode(address, type=Place)
    except msgspec.DecodeError as error:
        raise KvRefused(f"KV move refused: {address[:40]!r} is not an address of a reserved engine ({error})") from None


# ---- the destination ------------------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """What comes at present, and of whom."""

    sender: bytes
    header: Header
    plan: NATIVE_PLAN
    missing: set[int]


@dataclass
class Expected:
    """What a reservation takes: KV of this model and these weights, into these slots (int64 [tokens], whole pages)."""

    fingerprint: str
    weight_id: int
    pool: Pool
    slots: torch.Tensor
    threads: int = 1

    @property
    def shape(self) -> Shape:
        return self.pool.shape


@dataclass
class Inbox:
    """Receives the parts of one move into reserved slots. `tokens` are those whose KV is there and checked; `complete` after the last part.

    A part that was refused ends the move: what follows is refused too, as its chunks could be mistaken for those of the next part.
    `close` ends the thread; the slots may be given back once `ended()`, not before.
    """

    expected: Expected
    host: str
    machine: str
    wake: Callable[[], None] = lambda: None  # called in the thread at its end
    tokens: list[int] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self._closing = False
        self._taken: Taken | None = None
        self._part: _Part | None = None
        self._refused = ""
        self._context = zmq.Context(io_threads=STREAMS)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        server_public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._client_key = client_public.decode()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"laminar-kv")
        self._router.linger, self._router.rcvhwm = 1000, QUEUED
        self._router.curve_server, self._router.curve_secretkey = True, secret
        try:
            self._router.bind(f"tcp://{socket.gethostbyname(self.host)}:*")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            raise KvRefused(f"KV move refused: the destination cannot listen at {self.host} ({error})") from None
        port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        place = Place(self.host, port, self.machine, server_public.decode(), client_public.decode(), client_secret.decode())
        self.address = msgspec.json.encode(place).decode()
        self._thread = threading.Thread(target=self._run, name="kv-inbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        if (taken := self._taken) is not None:
            taken.refuse()  # the source leaves then, which ends the wait for its next chunk

    def ended(self, seconds: float = 0.0) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._zap, zmq.POLLIN)
        try:
            while not self._closing:
                events = dict(poller.poll(POLL_SECONDS * 1000))
                if self._zap in events:
                    self._admit()
                if self._router in events:
                    self._take(self._router.recv_multipart(copy=False))
        finally:
            self._router.close()
            self._zap.close(0)
            self._context.term()
            self.wake()

    def _admit(self) -> None:
        frames = self._zap.recv_multipart()
        welcome = frames[5] == b"CURVE" and len(frames) == 7 and z85.encode(frames[6]).decode() == self._client_key
        self._zap.send_multipart([frames[0], frames[1], b"200" if welcome else b"400", b"" if welcome else b"unknown key", b"", b""])

    def _take(self, frames: list[zmq.Frame]) -> None:
        sender, kind, *rest = frames
        try:
            if self._refused:
                raise KvRefused(self._refused)
            match bytes(kind), len(rest):
                case (b"part", 1):
                    self._begin(bytes(sender), rest[0].buffer)
                case (b"shm", 1) if self._part is not None:
                    self._from_memory(self._part, bytes(rest[0]).decode())
                case (b"rows", 1) if self._part is not None:
                    self._rows(self._part, rest[0].buffer)
                case _:
                    raise KvRefused("KV move failed: a message that belongs to no part")
        except (KvRefused, UnicodeDecodeError) as error:
            to = self._part.sender if self._part is not None else bytes(sender)
            self._part, self.complete = None, False
            self._refused = self._refused or str(error)
            self._router.send_multipart([to, b"no", self._refused.encode()])

    def _begin(self, sender: bytes, data: memoryview) -> None:
        self._part = None
        header, expected = decode_header(data), self.expected
        check_fits(header, fingerprint=expected.fingerprint, weight_id=expected.weight_id, shape=expected.shape)
        end = header.first + header.tokens
        if header.first > len(self.tokens) or end > len(expected.slots):
            there = f"{len(self.tokens)} tokens are there and {len(expected.slots)} reserved"
            raise KvRefused(f"KV part refused: tokens {header.first} to {end} do not fit where {there}")
        self.tokens, self.complete = self.tokens[: header.first], False  # a part sent anew replaces the old one
        plan = expected.pool.plan(expected.slots[header.first : end], header.chunk_bytes, expected.threads, distinct=True)
        chunks = expected.shape.chunks(header.tokens, header.chunk_bytes)
        self._part = _Part(sender, header, plan, set(range(chunks)))
        self._router.send_multipart([sender, b"go"])

    def _from_memory(self, part: _Part, path: str) -> None:
        first, expected = part.header.first, self.expected
        with Taken(path) as taken:
            if taken.header != part.header:
                raise KvRefused("KV part refused: the offer is of another part")
            self._taken = taken
            try:
                if self._closing:
                    raise KvRefused("KV move failed: the destination gave it up")
                taken.receive(expected.pool, expected.slots[first : first + part.header.tokens], expected.threads)
                taken.accept()
            finally:
                self._taken = None
        self._done(part)

    def _rows(self, part: _Part, record: memoryview) -> None:
        number = int.from_bytes(record[4:8], "little")
        if number not in part.missing or not extension().unpack_chunk(*part.plan, number, record):
            raise KvRefused(f"KV chunk {number} refused: it is not one of those expected, or its checksum differs")
        part.missing.discard(number)
        if not part.missing:
            self._done(part)

    def _done(self, part: _Part) -> None:
        self.tokens, self.complete = self.tokens + part.header.ids(), part.header.last
        self._part = None
        self._router.send_multipart([part.sender, b"ok"])


# ---- the source -----------------------------------------------------------------------------------------------------------------------


def chunk_bytes(address: str, machine: str) -> int:
    """What a part's header must name for this way."""
    return CHUNK_BYTES if decode_address(address).machine == machine else TCP_CHUNK_BYTES


def send_part(
    address: str,
    header: Header,
    pool: Pool,
    slots: torch.Tensor,
    *,
    machine: str,
    folder: str,
    threads: int = 1,
    seconds: float = WAIT_SECONDS,
) -> None:
    """Sends the KV of `slots` (int64 [tokens]). `folder` is shared memory's, used where the destination's machine is `machine`.

    Blocks; every wait for the destination ends after `seconds`. Raises KvRefused for whatever goes wrong.
    """
    place = decode_address(address)
    local = place.machine == machine
    plan = pool.plan(slots, header.chunk_bytes, threads, distinct=False, streaming=False)
    with zmq.Context(io_threads=1 if local else STREAMS) as context:
        streams = [_connect(context, place, seconds) for _ in range(1 if local else STREAMS)]
        try:
            streams[0].send_multipart([b"part", encode_header(header)])
            _answer(streams[0], b"go", place, seconds)
            if local:
                _offer(streams[0], header, pool, slots, folder, threads, seconds)
            else:
                _stream(streams, plan, pool.shape, header, place, seconds)
            _answer(streams[0], b"ok", place, seconds)
        except zmq.Again:
            raise KvRefused(f"KV move failed: the destination at {place.host}:{place.port} took nothing for {seconds:g} s") from None
        finally:
            for stream in streams:
                stream.close(0)


def _connect(context: zmq.Context, place: Place, seconds: float) -> zmq.Socket:
    stream = context.socket(zmq.DEALER)
    stream.curve_serverkey = place.server_public.encode()
    stream.curve_publickey, stream.curve_secretkey = place.client_public.encode(), place.client_secret.encode()
    stream.sndtimeo, stream.sndhwm = int(seconds * 1000), QUEUED
    stream.connect(f"tcp://{place.host}:{place.port}")
    return stream


def _answer(stream: zmq.Socket, wanted: bytes, place: Place, seconds: float) -> None:
    if not stream.poll(seconds * 1000):
        raise KvRefused(f"KV move failed: the destination at {place.host}:{place.port} said nothing for {seconds:g} s")
    kind, *rest = stream.recv_multipart()
    if kind != wanted:
        raise KvRefused(rest[0].decode(errors="replace") if rest else "KV move failed: the destination speaks another protocol")


def _offer(stream: zmq.Socket, header: Header, pool: Pool, slots: torch.Tensor, folder: str, threads: int, seconds: float) -> None:
    with Offer(header, folder, seconds=seconds) as offer:
        stream.send_multipart([b"shm", str(offer.path).encode()])
        try:
            offer.send(pool, slots, threads)
        except KvRefused as error:
            if stream.poll(1000):  # the destination says why
                return
            raise error


def _stream(streams: list[zmq.Socket], plan: NATIVE_PLAN, shape: Shape, header: Header, place: Place, seconds: float) -> None:
    record = aligned(shape.record_bytes(header.chunk_bytes)).numpy()
    start = time.monotonic()
    for number in range(shape.chunks(header.tokens, header.chunk_bytes)):
        extension().pack_chunk(*plan, number, record)
        length = 64 + int.from_bytes(record[8:16].tobytes(), "little")
        streams[number % len(streams)].send_multipart([b"rows", memoryview(record)[:length]])
        if streams[0].poll(0):  # an early "no"
            return
        if time.monotonic() - start > 10 * seconds:
            raise KvRefused(f"KV move failed: it took the destination at {place.host}:{place.port} more than {10 * seconds:g} s")
