"""KV caches that a relay keeps in host memory, as they came over the wire: headers and chunk records
(frames.py), whose checksums were made at the source and are compared here and at the taker.

One encrypted socket and a thread take all that comes; each rank of each move has a key pair of its own, by
which the socket knows what a message is of. Protocol: transfer.py, over TCP only. What is handed on goes the
same way, so the taker's engine sees no difference from a source's.
"""

import contextlib
import struct
import threading
from dataclasses import dataclass, field

import msgspec
import torch
import zmq

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import CHUNK_HEAD_BYTES, PartHeader, decode_header
from laminar_hpc.engine.kv.transfer import KvAddress, of_all_ranks, of_rank, send_records
from laminar_hpc.line.admission import CurveAuthenticator, listen
from laminar_hpc.weights.kernels.sums import tensor_sums

POLL_SECONDS = 0.05
_RECORD = struct.Struct("<4sIQQQ")  # magic, number, payload bytes, sums
_MAGIC = b"KCVK"


@dataclass
class _ParkedPart:
    """What comes of `sender`, or has come; chunk records by their number."""

    sender: bytes
    header: PartHeader
    size: int
    records: dict[int, bytearray] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        return self.header.shape.chunks(self.header.tokens, self.header.chunk_bytes)


@dataclass
class _RankCache:
    """What has come of one rank's rows. `refused`: why nothing more is taken."""

    parts: list[_ParkedPart] = field(default_factory=list)
    refused: str = ""

    @property
    def tokens(self) -> int:
        """That the parts which are whole make up, if the last one is among them."""
        whole = bool(self.parts) and all(len(part.records) == part.chunks for part in self.parts)
        last = self.parts[-1].header if whole else None
        return last.first + last.tokens if last is not None and last.last and not self.refused else 0


class HostPark:
    """See KvPark. `limit` bytes at most, of engines with so many tensor-parallel `ranks`."""

    def __init__(self, host: str, limit: int, ranks: int) -> None:
        self._host = host
        self._limit = limit
        self._ranks = ranks
        self._held = 0
        self._lock = threading.Lock()  # of what is kept
        self._moves: dict[str, list[_RankCache]] = {}
        self._context = zmq.Context()
        server_public, secret = zmq.curve_keypair()
        self._public = server_public.decode()
        self._admission = CurveAuthenticator(self._context)
        self._keys: dict[str, list[str]] = {}
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"laminar-kv")
        self._router.linger = 0
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        try:
            self._port = listen(self._router, host)
        except OSError as error:
            self._context.destroy(0)
            raise KvRefused(f"KV cannot be parked: the relay cannot listen at {host} ({error})") from None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-park", daemon=True)
        self._thread.start()

    # ---- called by the relay -------------------------------------------------------------------------------

    def open(self, move_id: str) -> str:
        if self._held >= self._limit:
            raise KvRefused(f"KV cannot be parked: {self._full()}")
        addresses, keys = [], []
        for rank in range(self._ranks):
            public, secret = (key.decode() for key in zmq.curve_keypair())
            self._admission.users[public] = f"{rank}/{move_id}"
            keys.append(public)
            # of no machine: it comes over TCP, in chunks of that way
            address = KvAddress(self._host, self._port, "", False, self._public, public, secret)
            addresses.append(msgspec.json.encode(address).decode())
        with self._lock:
            self._moves[move_id] = [_RankCache() for _ in range(self._ranks)]
            self._keys[move_id] = keys
        return of_all_ranks(addresses)

    def kept(self, move_id: str) -> tuple[int, int]:
        self._admit_no_more(move_id)
        with self._lock:
            ranks = self._moves.get(move_id, [])
            tokens = {rank.tokens for rank in ranks}
            if len(tokens) == 1 and (count := tokens.pop()):
                return count, sum(part.size for rank in ranks for part in rank.parts)
        self.drop(move_id)
        return 0, 0

    def hand_on(self, move_id: str, address: str, seconds: float) -> tuple[int, int]:
        tokens, size = self.kept(move_id)
        if not tokens:
            raise KvRefused(f"KV of {move_id} is not kept here")
        with self._lock:  # one taker at most
            ranks = self._moves.pop(move_id, [])
        try:
            for number, rank in enumerate(ranks):
                to = of_rank(address, number, self._ranks)
                send_records(to, [(part.header, list(part.records.values())) for part in rank.parts], seconds)
        finally:
            self._give_back(ranks)
        return (tokens, size) if ranks else (0, 0)

    def drop(self, move_id: str) -> None:
        self._admit_no_more(move_id)
        with self._lock:
            ranks = self._moves.pop(move_id, [])
        self._give_back(ranks)

    def close(self) -> None:
        self._closing = True
        self._thread.join(10 * POLL_SECONDS)

    def _admit_no_more(self, move_id: str) -> None:
        for key in self._keys.pop(move_id, []):
            self._admission.users.pop(key, None)

    def _give_back(self, ranks: list[_RankCache]) -> None:
        with self._lock:
            self._held -= sum(part.size for rank in ranks for part in rank.parts)

    def _full(self) -> str:
        return f"{self._held} bytes are kept, {self._limit} may be (relay.parked_gigabytes)"

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._admission.poll(self._router, int(POLL_SECONDS * 1000)):
                    self._take(self._router.recv_multipart(copy=False))
        finally:
            self._router.close()
            self._admission.close()
            self._context.term()

    def _take(self, frames: list[zmq.Frame]) -> None:
        sender, kind, *rest = frames
        number, _, move_id = str(sender.get("User-Id")).partition("/")
        with self._lock:
            ranks = self._moves.get(move_id)
            rank = ranks[int(number)] if ranks else _RankCache(refused=f"KV of {move_id} is not taken here")
            answer: list[bytes] = []
            to = rank.parts[-1].sender if rank.parts else sender.bytes
            try:
                if rank.refused:
                    raise KvRefused(rank.refused)
                match kind.bytes, len(rest):
                    case (b"part", 1):
                        to = sender.bytes
                        self._begin(rank, to, rest[0].buffer)
                        answer = [b"go"]
                    case (b"rows", 1) if rank.parts:
                        answer = [b"ok"] if _whole_with(rank.parts[-1], rest[0].buffer) else []
                    case _:
                        raise KvRefused("KV move failed: a message that belongs to no part")
            except KvRefused as error:
                rank.refused = str(error)
                answer = [b"no", rank.refused.encode()]
        if answer:
            with contextlib.suppress(zmq.ZMQError):  # it has gone meanwhile
                self._router.send_multipart([to, *answer])

    def _begin(self, rank: _RankCache, sender: bytes, data: memoryview) -> None:
        """With the lock. A part that begins anew replaces all; one that overlaps the last is kept beside it:
        the taker's engine cuts what it has, as it does for a source."""
        header = decode_header(data)
        shape = header.shape
        there = rank.parts[-1].header.first + rank.parts[-1].header.tokens if rank.parts else 0
        if header.first > there or (rank.parts and len(rank.parts[-1].records) < rank.parts[-1].chunks):
            raise KvRefused(f"KV part refused: it begins at token {header.first}, {there} are there")
        if not header.first:
            self._held -= sum(part.size for part in rank.parts)
            rank.parts.clear()
        chunks = shape.chunks(header.tokens, header.chunk_bytes)
        size = 2 * shape.layers * header.tokens * shape.row_bytes + chunks * CHUNK_HEAD_BYTES
        if self._held + size > self._limit:
            raise KvRefused(f"KV cannot be parked: {self._full()}, it has {size}")
        self._held += size
        rank.parts.append(_ParkedPart(sender, header, size))


def _whole_with(part: _ParkedPart, record: memoryview) -> bool:
    """Takes a chunk; whether it was the part's last one. Raises KvRefused for one that is damaged."""
    shape, payload = part.header.shape, len(record) - CHUNK_HEAD_BYTES
    known = CHUNK_HEAD_BYTES < len(record) <= shape.record_bytes(part.header.chunk_bytes)
    magic, number, size, words, indexed = _RECORD.unpack_from(record) if known else (b"", 0, 0, 0, 0)
    if magic != _MAGIC or size != payload or number >= part.chunks or number in part.records:
        raise KvRefused(f"KV chunk {number} refused: it is none of the part's, or there already")
    kept = bytearray(record)
    if tensor_sums(torch.frombuffer(kept, dtype=torch.uint8, offset=CHUNK_HEAD_BYTES)) != (words, indexed):
        raise KvRefused(f"KV chunk {number} refused: its checksum differs")
    part.records[number] = kept
    return len(part.records) == part.chunks
