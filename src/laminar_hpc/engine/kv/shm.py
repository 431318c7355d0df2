"""A move through shared memory on one machine: the source gathers into a ring of chunks while the destination
scatters out of it.

    offer = ShmOffer(header, "/dev/shm")           source: the file, mode 0600; its path is sent there
    taken = Taken(path)                         destination: maps, unlinks it; taken.header says what comes
    offer.send(pool, slots)                     gathers; returns when the destination has accepted, or raises
    taken.receive(pool, slots); taken.accept()  scatters and checks each chunk; or taken.refuse()

    file     u64 magic, u64 ring slots | 64: source's state | 128: destination's state
             | 192: sequence words, a cache line each | header | records

Each side holds a lock on its byte of the file (source 0, destination 1), which the kernel drops with the
process: so death is seen. Every wait for the other side is bounded. The same user on the same machine is
trusted not to cut the file while it is mapped.
"""

import mmap
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Any, Self

import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import MAX_HEADER_BYTES, PartHeader, decode_header, encode_header
from laminar_hpc.engine.kv.native import extension
from laminar_hpc.engine.kv.offers import PREFIX, held, hold, remove_abandoned
from laminar_hpc.engine.kv.pool import Pool

# the ring stays in the second-level cache, and a chunk's turn costs little beside its copy
CHUNK_BYTES = 1 << 17
RING_SLOTS = 8
WAIT_SECONDS = 30.0  # of one wait for the other side
THERE, DONE, GONE = 1, 2, 3  # a side's states, as in csrc/ring.h
_MAGIC = 0x31474E49524B564C
_HEAD = struct.Struct("<QQ")
_STATES = (64, 128)
_SEQUENCES, _MOST_SLOTS = 192, 1024
_ENDS = {1: "said nothing for {seconds:g} s", 2: "died", 3: "gave the move up"}


class _Side:
    """One side's map of the file. `side` is 0 for the source, 1 for the destination."""

    def __init__(
        self, fd: int, side: int, header: PartHeader, slots: int, header_bytes: int, seconds: float
    ) -> None:
        self.header = header
        self.seconds = seconds
        self.peer = ("destination", "source")[side]
        self._fd = fd
        self._side = side
        records = _records_at(slots, header_bytes)
        self._map = mmap.mmap(fd, records + slots * header.shape.record_bytes(header.chunk_bytes))
        self._ring = (_STATES[side], _STATES[1 - side], _SEQUENCES, records, slots, fd, 1 - side, seconds)
        self._say(THERE)

    def _say(self, state: int) -> None:
        extension().say(self._map, self._ring, state)

    def _ended(self, end: int, during: str) -> KvRefused:
        return KvRefused(
            f"KV move failed: the {self.peer} {_ENDS[end].format(seconds=self.seconds)} {during}"
        )

    def close(self) -> None:
        """Gives up what is not done; a second call does nothing."""
        if self._fd >= 0:
            if struct.unpack_from("<I", self._map, _STATES[self._side])[0] != DONE:
                self._say(GONE)
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ShmOffer(_Side):
    """The source's side. Raises KvRefused where shared memory has no room."""

    def __init__(
        self,
        header: PartHeader,
        folder: str | Path = "/dev/shm",
        slots: int = RING_SLOTS,
        seconds: float = WAIT_SECONDS,
    ) -> None:
        encoded = encode_header(header)
        remove_abandoned(Path(folder))
        self.path = Path(folder) / f"{PREFIX}{secrets.token_hex(8)}"
        size = _records_at(slots, len(encoded)) + slots * header.shape.record_bytes(header.chunk_bytes)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            hold(fd, 0)
            os.pwrite(fd, _HEAD.pack(_MAGIC, slots), 0)
            os.pwrite(fd, encoded, _SEQUENCES + 64 * slots)
            super().__init__(fd, 0, header, slots, len(encoded), seconds)
        except OSError as error:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise KvRefused(
                f"KV move refused: {folder} has no {size} bytes for it ({error.strerror})"
            ) from None

    def send(self, pool: Pool, slots: torch.Tensor, threads: int = 1, **options: Any) -> None:
        """Gathers `slots` chunk by chunk as the ring has room; returns once the destination has accepted,
        else raises KvRefused."""
        _same(self.header, pool, slots)
        # The ring is read at once: what is written into it stays in the cache.
        plan = pool.plan(
            slots, self.header.chunk_bytes, threads, distinct=False, **{"streaming": False, **options}
        )
        self._await(0, "before it opened the offer")
        end, chunk = extension().send(*plan, self._map, self._ring)
        if end:
            raise self._ended(end, f"at chunk {chunk}")
        self._await(THERE, "before it accepted")
        self._say(DONE)

    def _await(self, state: int, during: str) -> None:
        end, now = extension().wait(self._map, self._ring, state)
        if end or now not in (THERE, DONE):
            raise self._ended(end or 3, during)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        super().close()


class Taken(_Side):
    """The destination's side of the offer at `path`, which no other can take after it. Raises KvRefused for
    anything but an offer."""

    def __init__(self, path: str | Path, seconds: float = WAIT_SECONDS) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise KvRefused(f"KV offer {path} refused: {error.strerror}") from None
        try:
            status = os.fstat(fd)
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_uid != os.geteuid()
                or stat.S_IMODE(status.st_mode) != 0o600
            ):
                raise KvRefused(f"KV offer {path} refused: it is no file of this user with mode 0600")
            hold(fd, 1)
            header, slots, header_bytes = _read_head(fd, status.st_size)
            if not held(fd, 0):
                raise KvRefused(f"KV offer {path} refused: the source has died")
            super().__init__(fd, 1, header, slots, header_bytes, seconds)
        except KvRefused:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            raise KvRefused(f"KV offer {path} refused: it is taken, or {error.strerror}") from None
        Path(path).unlink(missing_ok=True)

    def receive(self, pool: Pool, slots: torch.Tensor, threads: int = 1, **options: Any) -> None:
        """Scatters into reserved `slots`, every chunk checked. Raises KvRefused, with the slots in part
        written, where that fails."""
        _same(self.header, pool, slots)
        plan = pool.plan(slots, self.header.chunk_bytes, threads, distinct=True, **options)
        end, chunk = extension().receive(*plan, self._map, self._ring)
        if end == 4:
            raise KvRefused(f"KV chunk {chunk} refused: it is not the one expected, or its checksum differs")
        if end:
            raise self._ended(end, f"at chunk {chunk}")

    def accept(self) -> None:
        """Tells the source that the whole cache is here and checked."""
        self._say(DONE)

    def refuse(self) -> None:
        """Tells the source that nothing will be kept."""
        self._say(GONE)


def _records_at(slots: int, header_bytes: int) -> int:
    return -(-(_SEQUENCES + 64 * slots + header_bytes) // 4096) * 4096


def _read_head(fd: int, size: int) -> tuple[PartHeader, int, int]:
    """Header, ring slots and header bytes of a file, all checked against its size."""
    head = os.pread(fd, _HEAD.size, 0)
    magic, slots = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    if magic != _MAGIC or not 1 <= slots <= _MOST_SLOTS:
        raise KvRefused("KV offer refused: the file is not an offer of this version")
    header = decode_header(os.pread(fd, MAX_HEADER_BYTES, _SEQUENCES + 64 * slots))
    header_bytes = len(encode_header(header))
    needed = _records_at(slots, header_bytes) + slots * header.shape.record_bytes(header.chunk_bytes)
    if size < needed:
        raise KvRefused(f"KV offer refused: the file has {size} bytes, its header needs {needed}")
    return header, slots, header_bytes


def _same(header: PartHeader, pool: Pool, slots: torch.Tensor) -> None:
    if header.shape != pool.shape or header.tokens != len(slots):
        raise KvRefused(
            f"KV move refused: {header.tokens} tokens of "
            f"{header.shape} against {len(slots)} slots of {pool.shape}"
        )
