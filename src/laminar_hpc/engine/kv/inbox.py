"""The destination of a move: an encrypted socket and a thread that scatters what comes into reserved slots.
Protocol: transfer.py."""

import contextlib
import logging
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import msgspec
import torch
import zmq

from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import PartHeader, Shape, check_fits, decode_header
from laminar_hpc.engine.kv.native import extension
from laminar_hpc.engine.kv.pool import NATIVE_PLAN, Pool
from laminar_hpc.engine.kv.shm import Taken
from laminar_hpc.engine.kv.transfer import QUEUED, STREAMS, KvAddress
from laminar_hpc.line.admission import CurveAuthenticator, listen
from laminar_hpc.weights.links.streams import StreamEvent

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05


@dataclass
class _Part:
    """What comes at present, of whom, and where to; `stage` if it comes through the host for a GPU."""

    sender: bytes
    header: PartHeader
    slots: torch.Tensor
    missing: set[int]
    taken: int = 0  # pieces that a source shares on its GPU
    stage: device.Stage | None = None
    plan: NATIVE_PLAN | None = None  # of chunks that come one by one


@dataclass
class Expected:
    """What a reservation takes: KV of this model and these weights, into these slots (int64 [tokens] on the
    CPU, whole pages)."""

    fingerprint: str
    weight_id: int
    pool: Pool
    slots: torch.Tensor
    threads: int = 1
    after: StreamEvent | None = None  # of a GPU: when nothing else writes into the slots any more

    @property
    def shape(self) -> Shape:
        return self.pool.shape


@dataclass
class KvInbox:
    """Receives the parts of one move into reserved slots. `tokens` are those whose KV is there and checked;
    `complete` after the last part.

    A part that was refused ends the move: what follows is refused too, as its chunks could be mistaken for
    those of the next part. `close` ends the thread; the slots may be given back once `left` is done, not
    before.
    """

    expected: Expected
    host: str
    machine: str
    tokens: list[int] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self._closing = False
        self.left: Future[None] = Future()
        self._taken: Taken | None = None
        self._part: _Part | None = None
        self._mapped = device.MappedKv(self.expected.pool.tensors[0].device)
        self._refused = ""
        self._context = zmq.Context(io_threads=STREAMS)
        server_public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._admission = CurveAuthenticator(self._context, client_public.decode())
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"laminar-kv")
        self._router.linger = 1000
        self._router.rcvhwm = QUEUED
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        try:
            port = listen(self._router, self.host)
        except OSError as error:
            self._context.destroy(0)
            raise KvRefused(
                f"KV move refused: the destination cannot listen at {self.host} ({error})"
            ) from None
        gpu = device.can_share(self.expected.pool)
        place = KvAddress(
            self.host,
            port,
            self.machine,
            gpu,
            server_public.decode(),
            client_public.decode(),
            client_secret.decode(),
        )
        self.address = msgspec.json.encode(place).decode()
        threading.Thread(target=self._run, name="kv-inbox", daemon=True).start()

    def close(self) -> None:
        self._closing = True
        if (taken := self._taken) is not None:
            with contextlib.suppress(TypeError):  # the thread has closed its memory just now
                taken.refuse()  # the source leaves then, which ends the wait for its next chunk

    def ended(self, seconds: float = 0.0) -> bool:
        """Waits for the thread's end, at most so long."""
        return bool(wait([self.left], seconds).done)

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._admission.poll(self._router, int(POLL_SECONDS * 1000)):
                    self._take(self._router.recv_multipart(copy=False))
        finally:
            self._mapped.close()
            self._router.close()
            self._admission.close()
            self._context.term()
            self.left.set_result(None)

    def _take(self, frames: list[zmq.Frame]) -> None:
        sender, kind, *rest = frames
        try:
            if self._refused:
                raise KvRefused(self._refused)
            match kind.bytes, len(rest):
                case (b"part", 1):
                    self._begin(sender.bytes, rest[0].buffer)
                case (b"gpu", 1) if self._part is not None:
                    self._from_gpu(self._part, rest[0].buffer)
                case (b"shm", 1) if self._part is not None:
                    self._from_memory(self._part, rest[0].bytes.decode())
                case (b"rows", 1) if self._part is not None:
                    self._rows(self._part, rest[0].buffer)
                case _:
                    raise KvRefused("KV move failed: a message that belongs to no part")
        except Exception as error:  # also of a GPU, out of memory or broken: the source must not wait for it
            if not isinstance(error, (KvRefused, UnicodeDecodeError, msgspec.DecodeError)):
                log.error("a KV move failed at its destination", exc_info=error)
                first = (str(error).splitlines() or [type(error).__name__])[0]
                error = KvRefused(f"KV move failed at its destination: {first}")
            to = self._part.sender if self._part is not None else sender.bytes
            self._part = None
            self.complete = False
            self._refused = self._refused or str(error)
            self._router.send_multipart([to, b"no", self._refused.encode()])

    def _begin(self, sender: bytes, data: memoryview) -> None:
        self._part = None
        header, expected = decode_header(data), self.expected
        check_fits(
            header, fingerprint=expected.fingerprint, weight_id=expected.weight_id, shape=expected.shape
        )
        end = header.first + header.tokens
        if header.first > len(self.tokens) or end > len(expected.slots):
            there = f"{len(self.tokens)} tokens are there and {len(expected.slots)} reserved"
            raise KvRefused(f"KV part refused: tokens {header.first} to {end} do not fit where {there}")
        # a part sent anew replaces the old one
        self.tokens = self.tokens[: header.first]
        self.complete = False
        chunks = expected.shape.chunks(header.tokens, header.chunk_bytes)
        self._part = _Part(sender, header, expected.slots[header.first : end], set(range(chunks)))
        self._router.send_multipart([sender, b"go"])

    def _host(self, part: _Part) -> tuple[Pool, torch.Tensor]:
        """Where the part goes in host memory: the pool itself, or what stands for a GPU's until all of the
        part is there."""
        if not device.on_gpu(self.expected.pool):
            return self.expected.pool, part.slots
        part.stage = part.stage or device.Stage.of(self.expected.pool, len(part.slots))
        return part.stage.pool, part.stage.slots

    def _from_gpu(self, part: _Part, ticket: memoryview) -> None:
        shared, expected = msgspec.msgpack.decode(ticket, type=device.Ticket), self.expected
        if shared.number != part.taken:
            raise KvRefused(f"KV part refused: piece {shared.number} came where {part.taken} was due")
        try:
            last = device.take_shared(shared, self._mapped, expected.pool, part.slots, expected.after)
        except RuntimeError as error:
            log.warning("KV comes through the host: %s", error)
            self._router.send_multipart([part.sender, b"host"])
            return
        part.taken += 1
        if last:
            self._done(part)
        else:
            self._router.send_multipart([part.sender, b"more"])

    def _from_memory(self, part: _Part, path: str) -> None:
        with Taken(path) as taken:
            if taken.header != part.header:
                raise KvRefused("KV part refused: the offer is of another part")
            self._taken = taken
            try:
                if self._closing:
                    raise KvRefused("KV move failed: the destination gave it up")
                taken.receive(*self._host(part), self.expected.threads)
                taken.accept()
            finally:
                self._taken = None
        self._done(part)

    def _rows(self, part: _Part, record: memoryview) -> None:
        if part.plan is None:
            pool, slots = self._host(part)
            part.plan = pool.plan(slots, part.header.chunk_bytes, self.expected.threads, distinct=True)
        number = int.from_bytes(record[4:8], "little")
        if number not in part.missing or not extension().unpack_chunk(*part.plan, number, record):
            raise KvRefused(
                f"KV chunk {number} refused: it is not one of those expected, or its checksum differs"
            )
        part.missing.discard(number)
        if not part.missing:
            self._done(part)

    def _done(self, part: _Part) -> None:
        if part.stage is not None:
            part.stage.empty(self.expected.pool, part.slots, self.expected.after)
        self.tokens = self.tokens + part.header.ids()
        self.complete = part.header.last
        self._part = None
        self._router.send_multipart([part.sender, b"ok"])
