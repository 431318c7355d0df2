"""The other end of store/payload/upload.py: payload files of rollouts that see no run directory, written into
it as their bytes come, by the thread of the bulk door.

    append -> written behind what is there -> settle: one sync for all that waited -> Stored

A byte is written once: what comes again is cut off, what does not begin where its file ends is not taken. A
writer belongs to the process that spoke of it first. What is told to be stored is on the disk.
"""

import logging
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.bulk import AppendBytes, AskStored, ReadBytes, Stored
from laminar_hpc.machine.files.durable import sync_folder
from laminar_hpc.store.payload.reader import is_file_name
from laminar_hpc.store.payload.writer import FOLDER

log = logging.getLogger(__name__)
_OPEN_FILES = 256  # more rollouts than these take turns


@dataclass
class _Growing:
    """A payload file that is open: bytes written, and of them those on the disk."""

    file: int
    written: int
    synced: int = 0
    asked: dict[str, Stored] = field(default_factory=dict)  # owed answers, by identity


class PayloadReceiver:
    """For one thread."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._open: OrderedDict[str, _Growing] = OrderedDict()  # by name, that used last at the end
        self._owners: dict[str, str] = {}  # of writers
        self._troubled: list[tuple[str, Stored]] = []  # whose files the disk has refused

    def append(self, identity: str, request: AppendBytes, body: bytes) -> None:
        """Raises LaminarError for what is no payload file, or another's."""
        owed = Stored(request.file, 0)
        growing = self._growing(identity, request.file, owed)
        if growing is None:
            return
        owed = growing.asked.setdefault(identity, owed)
        known = growing.written - request.offset
        if known < 0:
            owed.missing = True
            return
        rest = memoryview(body)[known:]
        try:
            while rest:
                count = os.pwrite(growing.file, rest, growing.written)
                rest = rest[count:]
                growing.written += count
        except OSError as error:  # a full disk, most often: what was written counts, the rest comes again
            owed.missing = True
            owed.trouble = self._says(request.file, error)

    def ask(self, identity: str, request: AskStored) -> None:
        """Raises LaminarError as `append`."""
        owed = Stored(request.file, 0)
        if (growing := self._growing(identity, request.file, owed)) is not None:
            growing.asked.setdefault(identity, owed).number = request.number

    def read(self, request: ReadBytes) -> bytes:
        """Raises LaminarError where there is no such payload file."""
        if not is_file_name(request.file):
            raise LaminarError(f"{request.file!r} is no payload file")
        return read_at(self._folder / request.file, request)

    def settle(self) -> list[tuple[str, Stored]]:
        """Syncs all that was written; the answers that are owed, to whom."""
        answers, self._troubled = self._troubled, []
        for name, growing in self._open.items():
            if not growing.asked:
                continue
            trouble = ""
            try:
                if growing.synced < growing.written:
                    os.fdatasync(growing.file)
                    growing.synced = growing.written
            except OSError as error:
                trouble = self._says(name, error)
            for identity, owed in growing.asked.items():
                owed.size = growing.synced
                owed.trouble = owed.trouble or trouble
                answers.append((identity, owed))
            growing.asked = {}
        while len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1].file)
        return answers

    def close(self) -> None:
        for growing in self._open.values():
            os.close(growing.file)
        self._open.clear()

    def _growing(self, identity: str, name: str, owed: Stored) -> _Growing | None:
        """The open file; None where the disk refuses, which `owed` tells the sender then."""
        if not is_file_name(name):
            raise LaminarError(f"{name!r} is no payload file")
        writer = name.rpartition(".")[0]
        if self._owners.setdefault(writer, identity) != identity:
            raise LaminarError(f"{name} is another process's")
        if (growing := self._open.get(name)) is not None:
            self._open.move_to_end(name)
            return growing
        try:
            self._folder.mkdir(exist_ok=True)
            file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            sync_folder(self._folder)
        except OSError as error:
            owed.missing = True
            owed.trouble = self._says(name, error)
            self._troubled.append((identity, owed))
            return None
        growing = self._open[name] = _Growing(file, os.fstat(file).st_size)
        return growing

    def _says(self, name: str, error: OSError) -> str:
        text = f"{self._folder / name}: {error.strerror or error}"
        log.warning("%s", text)
        return text


def read_at(path: Path, request: ReadBytes) -> bytes:
    """The bytes asked for, fewer at the end of the file. Raises LaminarError."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            return os.pread(file, request.size, request.offset)
        finally:
            os.close(file)
    except OSError as error:
        raise LaminarError(f"{path} cannot be read ({error.strerror})") from None
