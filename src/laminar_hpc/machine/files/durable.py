"""Files that outlive a power cut, and files that can be told from damaged ones. Imports no torch."""

import errno
import hashlib
import os
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

# of file systems on which a folder cannot be synced: they order a rename behind what is in it by themselves
_NOT_FOR_FOLDERS = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
}
_PIECE_BYTES = 16 << 20  # written and summed at once


class FileSum(NamedTuple):
    """What a file must be: its length, and the SHA-256 of its content in hexadecimal digits."""

    bytes: int
    sha256: str


def sum_of(content: bytes) -> FileSum:
    """Returns size and digest of what is to be written."""
    return FileSum(len(content), hashlib.sha256(content).hexdigest())


def seal(path: Path) -> FileSum:
    """Waits until the file is on the disk. Called by the process that has written it: on a shared file
    system another one can sync only what is its own. Raises OSError."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        return FileSum(os.fstat(file.fileno()).st_size, _digest(file))


class SealedFile:
    """A new file, written from its beginning to its end and summed on the way, so that nothing is read back.
    `check` is called before each piece; what it raises ends the writing."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self._file = open(path, "wb")  # noqa: SIM115
        self._sum = hashlib.sha256()
        self._bytes = 0
        self._check = check

    def __enter__(self) -> "SealedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Raises OSError."""
        left = memoryview(content).cast("B")
        for begin in range(0, len(left), _PIECE_BYTES):
            self._check()
            piece = left[begin : begin + _PIECE_BYTES]
            self._file.write(piece)
            self._sum.update(piece)
        self._bytes += len(left)
        return len(left)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """What is written lies with the system."""
        self._file.flush()

    def seal(self) -> FileSum:
        """Waits until all of it is on the disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileSum(self._bytes, self._sum.hexdigest())


def difference(path: Path, wanted: FileSum) -> str:
    """What is wrong with the file, in words that follow its name; "" if it is as it was sealed."""
    try:
        size = path.stat().st_size
        if size != wanted.bytes:
            return f"has {size} of its {wanted.bytes} bytes"
        with open(path, "rb") as file:
            if _digest(file) != wanted.sha256:
                return "has changed since it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _digest(file: BufferedIOBase) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, content: bytes) -> None:
    """On the disk when it returns, but for its name: that takes `sync_folder`."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    """The file has the old content or the new one, at any moment and after a power cut."""
    beside = path.with_name(f".{path.name}.new")
    write(beside, content)
    beside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the names in it are on the disk, where the file system knows how to."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(number)
