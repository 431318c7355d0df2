"""Files that others read at any moment. Imports no torch."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """A reader sees the old content or the new one, never a part. Not synced to the disk: see durable.py.
    `mode`: of a new file, less the process's umask."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    beside.replace(path)
