"""Append-only files of one JSON object per line, as a killed process leaves them.

`trace` and `metrics` write through `Appender`, everything that reads a run's files reads through `read`. A
line is written by one write call, so only a death or a full disk can tear one; `Appender` closes such a line
off before it goes on, and `read` leaves out what is no whole JSON object.
"""

import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec


def _plain(value: object) -> object:
    """A number of numpy or torch as Python's own; anything else unknown (a path, say) as text."""
    return value.item() if hasattr(value, "item") else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(dict)
_SEALED = re.compile(rb'(\{.*),"seal":"([0-9a-f]{16})"(.*)\n?')


class Appender:
    """Appends objects to `path`, which is made with its folder. Each object is in the file when `write`
    returns. A file that somebody has removed is made again, with all that it held, and `renewed` is called.
    Thread-safe."""

    def __init__(self, path: Path, renewed: Callable[[], None] = lambda: None, seals: bool = False) -> None:
        """`seals`: each line gets a digest of the rest of it as its last field, see `seals`."""
        self._seals = seals
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._renewed = renewed
        self._lock = threading.Lock()
        self._file = io.FileIO(path, "a")
        self._torn = self._file.tell() > 0 and not _ends_with_newline(path)

    def write(self, record: dict) -> None:
        """`record` holds plain values (also lists and dicts of them); NaN and infinity become null. No-op
        after `close`. Raises OSError when not all of it could be written."""
        line = _encoder.encode(record)
        line = b'%b,"seal":"%b"}\n' % (line[:-1], _seal(line)) if self._seals else line + b"\n"
        with self._lock:
            if self._file.closed:
                return
            if not self._path.exists() and self._path.parent.exists():
                self._renew()
            rest = memoryview(b"\n" + line if self._torn else line)
            self._torn = True
            while rest:  # a disk that is almost full takes a part and says so with the next call
                rest = rest[self._file.write(rest) :]
            self._torn = False

    def _renew(self) -> None:
        """From the removed file, which is there as long as it is open."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        shutil.copyfile(f"/proc/self/fd/{self._file.fileno()}", temporary)
        temporary.rename(self._path)
        self._file.close()
        self._file = io.FileIO(self._path, "a")
        self._renewed()

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(path: Path, *kinds: str) -> Iterator[dict]:
    """The objects of `path` in order, or only those of these kinds, which is faster.

    Nothing if there is no file; lines that a death tore apart are left out."""
    if not path.is_file():
        return
    wanted = [f'"kind":"{kind}"'.encode() for kind in kinds]
    with open(path, "rb") as file:
        for line in file:
            if wanted and not any(words in line for words in wanted):
                continue
            try:
                yield _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # a torn line: its writer died in the middle of it


def seals(path: Path) -> Iterator[bool | None]:
    """Of each line, whether it is as it was sealed; None of one without a seal. Torn lines are left out."""
    with open(path, "rb") as file:
        for line in file:
            if found := _SEALED.fullmatch(line):
                yield found[3] == b"}" and _seal(found[1] + b"}") == found[2]
            elif line.endswith(b"}\n"):
                yield False if b'"seal"' in line else None


def _seal(line: bytes) -> bytes:
    return blake2b(line, digest_size=8).hexdigest().encode()


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
