"""The files of a journal and what is in them: run_dir/journal/ as `store/journal.py` writes it and
`store/recovery.py` reads it.

    segment_ERA_NUMBER.log             transactions after NUMBER, until the next segment begins
    snapshot_ERA_NUMBER_DIGEST.sqlite  the whole store after transaction NUMBER
    era_ERA                            this era has been given to a controller

ERA counts the controllers that came here. No two have the same, and one that was replaced has a lower one
than its successor: a controller is given its era while it is sure of the run's lock, before it reads.

A file is a row of frames: magic, length, number, CRC-32 of these three, checksum, body. The checksum covers
the frame and the checksum before it, so it names one history up to this transaction. The first frame of a
segment is its header.

A death leaves a prefix of the last frame: what ends the last segment, with no whole frame behind it, was
never acknowledged and is left out. Anything else that does not fit is damage. What a controller of an
earlier era wrote after its successor had begun does not count, be it transactions, segments or snapshots.
"""

import itertools
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from laminar_hpc.machine.files.durable import sync_folder

_MAGIC = b"\xa7LJ1"
_FRAME = struct.Struct("<4sQQ")
_CRC = struct.Struct("<I")
_CHECKSUM_BYTES = 8
_HEADER_BYTES = 4096  # more than a segment's header takes
_HEAD_BYTES = _FRAME.size + _CRC.size + _CHECKSUM_BYTES
_SEGMENT = re.compile(r"segment_(\d+)_(\d+)\.log")
_ERA = re.compile(r"era_(\d+)")
_SNAPSHOT = re.compile(r"snapshot_(\d+)_(\d+)_([0-9a-f]+)\.sqlite")


@dataclass(frozen=True)
class Position:
    """The end of a history: the last transaction, who wrote it, and the checksum of all up to it."""

    era: int = 0
    number: int = 0
    checksum: bytes = bytes(_CHECKSUM_BYTES)

    def __str__(self) -> str:
        """Writes the position as the store's table `meta` holds it."""
        return f"{self.era} {self.number} {self.checksum.hex()}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        era, number, checksum = text.split()
        return cls(int(era), int(number), bytes.fromhex(checksum))


class SegmentHeader(msgspec.Struct, array_like=True):
    """The first frame of a segment; its number is that of the transaction before the segment."""

    store_id: str
    era: int
    checksum: bytes  # of that transaction


class Record(msgspec.Struct, array_like=True):
    """A transaction: statements that this segment has not had before, and its calls."""

    statements: list[str]
    calls: msgspec.Raw  # [(index of the statement in this segment, parameters)], in order


@dataclass(frozen=True)
class File:
    """A segment or a snapshot, by its name."""

    path: Path
    era: int
    number: int
    digest: str = ""  # of a snapshot's content

    @property
    def size(self) -> int:
        return self.path.stat().st_size


class DamagedJournal(Exception):
    """`path` cannot be read on at `offset`; transactions up to `number` are known."""

    def __init__(self, path: Path, offset: int, number: int) -> None:
        super().__init__(f"{path} is damaged at byte {offset}")
        self.path = path
        self.number = number


class OtherHistory(Exception):
    """The position that was asked for is not one of this journal's history."""


# ---- frames ------------------------------------------------------------------------------------------------


def frame(number: int, body: bytes, before: bytes) -> tuple[bytes, bytes]:
    """(the frame, its checksum); `before`: the checksum of the frame before."""
    head = _FRAME.pack(_MAGIC, len(body), number)
    checksum = _checksum(before, head, body)
    return b"".join((head, _CRC.pack(zlib.crc32(head)), checksum, body)), checksum


def _checksum(before: bytes, head: bytes, body: bytes | memoryview) -> bytes:
    digest = blake2b(before, digest_size=_CHECKSUM_BYTES)
    digest.update(head)
    digest.update(body)
    return digest.digest()


def _read_head(data: bytes, offset: int) -> tuple[int, int] | None:
    """(length, number) of the frame that begins there; None if none does."""
    if offset + _HEAD_BYTES > len(data):
        return None
    head = data[offset : offset + _FRAME.size]
    magic, length, number = _FRAME.unpack(head)
    (crc,) = _CRC.unpack_from(data, offset + _FRAME.size)
    return (length, number) if magic == _MAGIC and crc == zlib.crc32(head) else None


def _frame_follows(data: bytes, offset: int) -> bool:
    """Whether another frame begins behind the bad one at `offset`, which then was complete once."""
    found = data.find(_MAGIC, offset + 1)
    while found >= 0 and _read_head(data, found) is None:
        found = data.find(_MAGIC, found + 1)
    return found >= 0


class Segment:
    """A segment that is read. `offset` is where reading has come to, `at` the history's position there.

    Raises DamagedJournal when its header is not whole."""

    def __init__(self, file: File, length: int = -1) -> None:
        """`length`: how many bytes of it are read; -1 for all."""
        self.path = file.path
        with open(file.path, "rb") as source:
            self._data = source.read(length)
        self.offset = 0
        self.at = Position(file.era, file.number)
        self.statements: list[str] = []
        header = self._next(bytes(_CHECKSUM_BYTES), file.number)
        if header is None:
            raise DamagedJournal(file.path, 0, file.number)
        self.header = msgspec.msgpack.decode(header[0], type=SegmentHeader)
        self.at = Position(file.era, file.number, self.header.checksum)

    def transactions(self, until: int | None) -> Iterator[msgspec.Raw]:
        """The calls of each transaction, up to number `until`, the end, or a frame that is not whole."""
        while self.at.number != until:
            found = self._next(self.at.checksum, self.at.number + 1)
            if found is None:
                return
            body, checksum = found
            record = msgspec.msgpack.decode(body, type=Record)
            self.statements += record.statements
            self.at = Position(self.at.era, self.at.number + 1, checksum)
            yield record.calls

    def _next(self, before: bytes, number: int) -> tuple[bytes, bytes] | None:
        """(body, checksum) of the frame at `offset`, which moves on; None at the end, torn or not."""
        start = self.offset
        head = _read_head(self._data, start)
        if head is not None and head[1] == number:
            body_at = start + _HEAD_BYTES
            end = body_at + head[0]
            if end <= len(self._data):
                body = self._data[body_at:end]
                checksum = _checksum(before, self._data[start : start + _FRAME.size], body)
                if checksum == self._data[body_at - _CHECKSUM_BYTES : body_at]:
                    self.offset = end
                    return body, checksum
        if _frame_follows(self._data, start):
            raise DamagedJournal(self.path, start, number - 1)
        return None


# ---- the folder --------------------------------------------------------------------------------------------


def segment_name(position: Position) -> str:
    """Names the segment that begins after `position`."""
    return f"segment_{position.era:06d}_{position.number:012d}.log"


def snapshot_name(position: Position, digest: str) -> str:
    """Names the snapshot at `position`; `digest` is of its content."""
    return f"snapshot_{position.era:06d}_{position.number:012d}_{digest}.sqlite"


def segments(folder: Path) -> list[File]:
    """All segments that count, in the order in which they were begun."""
    return _history(_look(folder)[0])


def snapshots(folder: Path) -> list[File]:
    """All snapshots that count, the newest last."""
    found, snapshots = _look(folder)
    history = _history(found)
    dropped = {file.era for file in found} - {file.era for file in history}
    begun = [(file.era, file.number) for file in (*history, *snapshots) if file.era not in dropped]
    return [
        f
        for f in snapshots
        if f.era not in dropped and not any(era > f.era and number < f.number for era, number in begun)
    ]


def _look(folder: Path) -> tuple[list[File], list[File]]:
    """All segments, and all snapshots."""
    names = sorted(path.name for path in (folder.iterdir() if folder.is_dir() else ()))
    segments = [m for m in map(_SEGMENT.fullmatch, names) if m]
    snapshots = [m for m in map(_SNAPSHOT.fullmatch, names) if m]
    return (
        sorted((File(folder / m[0], int(m[1]), int(m[2])) for m in segments), key=_place),
        sorted((File(folder / m[0], int(m[1]), int(m[2]), m[3]) for m in snapshots), key=_place),
    )


def _place(file: File) -> tuple[int, int]:
    return file.era, file.number


def _history(found: list[File]) -> list[File]:
    """The segments of the newest era, before them those of the era that it goes on with, and so on: without
    what a controller has begun after its successor had."""
    of_eras: dict[int, list[File]] = {}
    for file in found:
        of_eras.setdefault(file.era, []).append(file)
    history = of_eras.pop(max(of_eras)) if of_eras else []
    while of_eras:
        latest_first = [of_eras[era] for era in sorted(of_eras, reverse=True)]
        if not (before := _before(history[0], latest_first)):
            break
        history = before + history
        of_eras = {era: files for era, files in of_eras.items() if era < history[0].era}
    return history


def _before(file: File, eras: list[list[File]]) -> list[File]:
    """Of the segments of earlier eras, the latest first, those that lead to the position at which the era of
    `file` has begun. Where none is known to, those of the latest that may."""
    may: list[File] = []
    for of_era in eras:
        leading = [each for each in of_era if each.number < file.number]
        # one that began there too and died before its first transaction; its snapshots may be all there is
        leading = leading or [each for each in of_era if each.number == file.number]
        leads = bool(leading) and _leads(leading[-1], file)
        if leads:
            return leading
        if leads is None and not may:
            may = leading
    return may


def _leads(segment: File, following: File) -> bool | None:
    """Whether `following` begins with the transaction that `segment` has of that number. None: it cannot be
    read so far."""
    try:
        read, begins = Segment(segment), Segment(following, _HEADER_BYTES).at
        for _ in read.transactions(begins.number):
            pass
    except DamagedJournal:
        return None
    return read.at.checksum == begins.checksum if read.at.number == begins.number else None


def newest_era(folder: Path) -> int:
    """0 if nobody wrote here."""
    return max((file.era for files in _look(folder) for file in files), default=0)


def claim_era(folder: Path, after: int = 0) -> int:
    """One that nobody else gets, later than `after` and than all that were given. For a controller that is
    sure of the run's lock when this has returned."""
    folder.mkdir(parents=True, exist_ok=True)
    given = [int(m[1]) for path in folder.iterdir() if (m := _ERA.fullmatch(path.name))]
    era = max(newest_era(folder), after, *given, 0) + 1
    while True:
        try:
            os.close(os.open(folder / f"era_{era:06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            era += 1
            continue
        sync_folder(folder)
        sync_folder(folder.parent)
        return era


def since(files: list[File], position: Position) -> list[File]:
    """Of these segments those that hold what came after `position`. None is of an era before it."""
    files = [file for file in files if file.era >= position.era]
    kept = [i for i, file in enumerate(files) if file.number <= position.number]
    return files[kept[-1] :] if kept else files


def read_after(folder: Path, start: Position) -> Iterator[tuple[Segment, msgspec.Raw]]:
    """The transactions after `start`: the segment, which knows its position and statements, and the calls.

    Raises OtherHistory when `start` is not on the history of the journal, Damaged where it cannot be read."""
    files = since(segments(folder), start)
    at: Position | None = None
    for file, following in itertools.zip_longest(files, files[1:]):
        until = None if following is None else following.number
        segment = Segment(file)
        at = _join(at, start, segment)
        for calls in segment.transactions(until):
            if at is None:
                at = _join(at, start, segment)
            else:
                at = segment.at
                yield segment, calls
        if until is not None and segment.at.number != until:
            raise DamagedJournal(file.path, segment.offset, segment.at.number)
    if files and at is None:
        raise OtherHistory


def _join(at: Position | None, start: Position, segment: Segment) -> Position | None:
    """Where the history goes on: None while `start` is not reached."""
    here, expected = segment.at, at or start
    if at is None and here.number < start.number:
        return None
    if here.number != expected.number or (at and here.checksum != at.checksum):
        raise DamagedJournal(segment.path, 0, expected.number)
    if here.checksum != expected.checksum:
        raise OtherHistory
    return expected
