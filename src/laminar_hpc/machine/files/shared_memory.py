"""Segments in /dev/shm that an engine's processes make and leave when killed: noted while they live, removed
once dead.

SGLang, NCCL and CUDA name their segments as they like, so a name proves nothing. A segment is noted as a
session's if one of its processes has it mapped or open, it is this user's, and it was not there before the
session began. It is removed when no living process has it any more. The note lies in the session's own
folder, whose owner is on record (folders.py).
"""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from laminar_hpc.machine.files.whole import write_whole

SHM = Path("/dev/shm")
NOTE_FILE = "shared-memory"


@dataclass(frozen=True)
class SharedSegment:
    """A file of /dev/shm; its inode tells it from another of the same name later."""

    name: str
    inode: int


def present() -> set[SharedSegment]:
    """This user's segments; no folders."""
    segments = set()
    with os.scandir(SHM) as entries:
        for entry in entries:
            status = _status(Path(entry.path))
            if status is not None:
                segments.add(SharedSegment(entry.name, status.st_ino))
    return segments


def session(leader: int) -> Iterator[int]:
    """Processes of the session that `leader` began, alive or not."""
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                yield pid
        except ProcessLookupError:
            pass


def held(pids: Iterable[int]) -> set[int]:
    """Inodes under /dev/shm that these processes have mapped or open, as far as we may look into them."""
    inodes = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as maps:
                inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if f" {SHM}/" in line}
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{descriptor}"
                if os.readlink(path).startswith(f"{SHM}/"):
                    inodes.add(os.stat(path).st_ino)
        except OSError:
            continue
    return inodes


@dataclass
class Note:
    """What one session has made so far, kept in `folder`. Make it before the session begins."""

    folder: Path
    before: set[SharedSegment] = field(default_factory=present)
    noted: set[SharedSegment] = field(default_factory=set)
    # new, but nobody of the session had it at the last look
    doubtful: set[SharedSegment] = field(default_factory=set)

    def update(self, leader: int) -> None:
        """Adds what the session of `leader` holds by now, if /dev/shm has something new."""
        new = present() - self.before - self.noted
        if not new:
            return
        inodes = held(session(leader))
        ours = {segment for segment in new if segment.inode in inodes}
        # seen twice with others: who makes a segment maps it at once
        self.before |= self.doubtful & (new - ours)
        self.doubtful = new - ours
        if ours:
            self.noted |= ours
            whole = "".join(
                f"{segment.inode} {segment.name}\n" for segment in sorted(self.noted, key=lambda s: s.name)
            )
            write_whole(self.folder / NOTE_FILE, whole)


def noted(folder: Path) -> list[Path]:
    """The segments that the folder's note names and that are still there."""
    try:
        lines = (folder / NOTE_FILE).read_text().splitlines()
    except OSError:
        return []
    paths = []
    for inode, _, name in (line.partition(" ") for line in lines):
        status = _status(SHM / Path(name).name)
        if status is not None and str(status.st_ino) == inode:
            paths.append(SHM / name)
    return paths


def remove_noted(folder: Path) -> bool:
    """Removes what the folder's note names but for what a living process has; whether nothing is left."""
    paths = noted(folder)
    inodes = held(psutil.pids()) if paths else set()
    for path in paths:
        status = _status(path)
        if status is not None and status.st_ino not in inodes:
            path.unlink(missing_ok=True)
    return not noted(folder)


def _status(path: Path) -> os.stat_result | None:
    """Returns the status of a regular file of this user, None for any other."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None
