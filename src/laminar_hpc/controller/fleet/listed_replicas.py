"""What `cluster.scale_command list` says: who is still to come of those that the program has started. Pure.

ID             it has a machine; if it does not join within a limit it never will
ID waiting     it waits for a machine, however long that takes
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.starter_id import PATTERN

_WAITING = "waiting"
_QUOTED = 60  # characters of a line that cannot be read


@dataclass(frozen=True)
class StillToCome:
    """IDs, in the order of the list: of those on their way, those of them that wait for a machine, and those
    that had a machine for longer than the limit."""

    coming: list[str]
    waiting: list[str]
    late: list[str]


class ListedReplicas:
    """Compares each list with those who are in the run. `limit`: seconds from the first list that has a
    replica with a machine, and not in the run, until it is late; also of one that has left the run and is
    started again."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since: dict[str, float] = {}

    def judge(self, text: str, here: Collection[str], now: float) -> StillToCome:
        """`text`: what the program has printed; `here`: IDs of the run's members and of those that are being
        stopped. Raises LaminarError for a line that is neither of both kinds."""
        listed = dict(_read(line) for line in text.splitlines() if line.strip())
        absent = {name: waits for name, waits in listed.items() if name not in here}
        self._since = {name: self._since.get(name, now) for name, waits in absent.items() if not waits}
        late = [name for name, since in self._since.items() if now - since > self._limit]
        coming = [name for name in absent if name not in late]
        return StillToCome(coming, [name for name in coming if absent[name]], late)


def _read(line: str) -> tuple[str, bool]:
    """An ID, and whether it waits."""
    name, *state = line.split()
    if state not in ([], [_WAITING]) or not re.search(PATTERN, name):
        raise LaminarError(f"has printed {line[:_QUOTED]!r}: print an ID a line, or an ID and `waiting`")
    return name, bool(state)
