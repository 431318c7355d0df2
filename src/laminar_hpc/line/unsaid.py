"""What a rollout that was told to end could not say because there was no controller:
`run_dir/unsaid/IDENTITY`, the frames of its stream up that nobody has acknowledged.

The next controller takes them as if they had come over the wire (controller/trajectories/unsaid_words.py):
their numbers tell what has arrived before.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from laminar_hpc.machine.files import durable

_FOLDER = "unsaid"
_LENGTH = 8  # bytes


class Head(msgspec.Struct):
    """Whose stream it is, the number of that rollout, to which store, and the number of the first frame."""

    identity: str
    index: int
    store_id: str
    first: int


def leave(run_dir: Path, head: Head, frames: Iterable[bytes]) -> Path:
    """All of it is on the disk when this returns. Raises OSError; then nothing is left."""
    folder = run_dir / _FOLDER
    folder.mkdir(exist_ok=True)
    path, temporary = folder / head.identity, folder / f".{head.identity}"
    try:
        with open(temporary, "wb") as file:
            for frame in (msgspec.msgpack.encode(head), *frames):
                file.write(len(frame).to_bytes(_LENGTH) + frame)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    durable.sync_folder(folder)
    return path


def left(run_dir: Path) -> list[Path]:
    """What ended rollouts have left there."""
    return sorted(path for path in (run_dir / _FOLDER).glob("*") if not path.name.startswith("."))


def read(path: Path) -> tuple[Head, Iterator[bytes]]:
    """Raises msgspec.DecodeError or OSError for what is none. Nothing in it runs code."""
    frames = _frames(path)
    return msgspec.msgpack.decode(next(frames, b""), type=Head), frames


def _frames(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            size = int.from_bytes(file.read(_LENGTH))
            left -= _LENGTH + size
            if left < 0:
                raise msgspec.DecodeError("it is cut off")
            yield file.read(size)
