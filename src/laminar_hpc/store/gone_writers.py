"""Which writers of payload files write no more, so that their last files can go when nothing lies in them.

Roles in one world end together: whoever wrote before this controller is gone. With roles apart a
rollout is gone when it has said so, when its process on this machine is dead, or when it has been away for
longer than any rollout waits for a controller; then its number may not come back.

    Goodbye, death -> ended; silence -> away; Hello -> is_gone, came
    each tick -> what is committed by now counts; the archive's next job asks `gone`
"""

from collections.abc import Callable
from pathlib import Path

from laminar_hpc.line import unsaid
from laminar_hpc.store.payload.writer import FOLDER
from laminar_hpc.store.put_back import WRITER


class GoneWriters:
    """`seconds`: that a rollout waits for a controller; `now`: monotonic seconds, as in `tick`."""

    def __init__(self, run_dir: Path, roles_apart: bool, seconds: float, now: float) -> None:
        folder = run_dir / FOLDER
        files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        writers = {name.rpartition(".")[0] for name in files}
        self._writers = {name for name in writers if not roles_apart or name.startswith(WRITER)}
        self._run_dir = run_dir
        self._seconds = seconds
        self._numbers = set[int]()
        self._ended = set[int]()
        absent = writers - self._writers if roles_apart else set[str]()
        self._away = {number: now for name in absent if (number := _number(name)) is not None}

    def ended(self, number: int) -> None:
        """It has said its last word. What it has said before is in the transaction of this turn."""
        self._away.pop(number, None)
        self._ended.add(number)

    def away(self, number: int, now: float) -> None:
        """It is no member any more, and may come back."""
        if number not in self._ended and number not in self._numbers:
            self._away[number] = now

    def came(self, number: int) -> None:
        """Also another process, where numbers are not given by the controller."""
        self._away.pop(number, None)
        self._ended.discard(number)
        self._numbers.discard(number)

    def is_gone(self, number: int) -> bool:
        """Whether files of it may have been removed."""
        return number in self._numbers

    def tick(self, now: float) -> None:
        late = {number for number, since in self._away.items() if now - since > self._seconds}
        for number in late:
            del self._away[number]
        self._numbers |= self._ended | late
        self._ended.clear()

    def gone(self) -> Callable[[str], bool]:
        """Whether a writer of this name is, as it is known at this moment; for another thread. Where a
        rollout has left last words (line/unsaid.py), they may name any of its files."""
        words = unsaid.left(self._run_dir)
        writers, numbers = frozenset(self._writers), frozenset(() if words else self._numbers)
        return lambda name: name in writers or _number(name) in numbers


def _number(writer: str) -> int | None:
    """Returns a rollout's number, by its writer's name."""
    head = writer.rpartition("_")[0].removeprefix("rollout")
    return int(head) if head.isdecimal() else None
