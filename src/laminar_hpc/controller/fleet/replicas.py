"""What the controller knows of each replica, beside its membership."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.line.messages.rollouts import RequestWork
from laminar_hpc.policies.waiting_line import WaitingLine


@dataclass
class Replica:
    """All of its present life."""

    weight_id: int | None = None  # of the verified weights that it serves, the newest of several
    newest_batch: int | None = None  # the id of the newest local batch that it was granted
    report: ReplicaLoad | None = None  # its newest one, from its pings
    report_is_outdated: bool = False  # it has refused a trajectory that the report had room for
    rejoins: bool = False  # it has not said yet what it holds: nothing is granted, what it asked is void
    leaving: bool = False  # it was told to end: it is given nothing new
    room: int | None = None  # refresh=versions: trajectories that it has asked for; None: a local batch

    @property
    def current_report(self) -> ReplicaLoad | None:
        return None if self.report_is_outdated else self.report

    @property
    def held(self) -> list[int]:
        """refresh=versions: all ids that it generates with, the newest first; else none."""
        return self.report.held[::-1] if self.report is not None and self.weight_id is not None else []


class Replicas:
    """The replicas by index. A row begins with the first message of a replica's life and ends with
    `replica_lost`. Only the methods below change who serves weights and who leaves: changes are counted."""

    def __init__(self) -> None:
        self._rows: dict[int, Replica] = {}
        self.waiting = WaitingLine()  # those without work
        self.pull_seconds = 0.0  # of the newest pull
        self.changes = 0  # rises when one begins or ceases to serve weights or to leave
        self._served = Counter[int]()  # by weight id, how many serve it
        self._leaving: dict[int, None] = {}
        self._starting: set[int] = set()  # without verified weights, by their reports

    def at(self, index: int) -> Replica:
        return self._rows.setdefault(index, Replica())

    def rows(self) -> dict[int, Replica]:
        return self._rows

    # ---- what happens --------------------------------------------------------------------------------------

    def reported(self, index: int, report: ReplicaLoad) -> None:
        row = self.at(index)
        row.report = report
        row.report_is_outdated = False
        (self._starting.add if report.phase == "unverified" else self._starting.discard)(index)

    def serves(self, index: int, weight_id: int | None) -> None:
        """From here on; None: no verified weights."""
        row = self.at(index)
        before = row.weight_id
        row.weight_id = weight_id
        if before == weight_id:
            return
        self.changes += before is None or weight_id is None
        if weight_id is not None:
            self._served[weight_id] += 1
        if before is not None:
            self._served[before] -= 1
            if not self._served[before]:
                del self._served[before]

    def asks(self, index: int, request: RequestWork) -> None:
        """A request that a grant crossed on its way is void; the weights that it names are served, or will
        be."""
        row = self.at(index)
        if row.rejoins:
            return
        if not request.ahead:
            self.serves(index, request.weight_id)  # known anew of a replica that was taken for dead
        crossed = row.newest_batch is not None and request.newest_batch != row.newest_batch
        if not crossed and not row.leaving:
            row.room = request.room
            self.waiting.ask(index, request.weight_id)

    def granted(self, index: int, batch_id: int) -> None:
        self.at(index).newest_batch = batch_id
        self.waiting.leave(index)

    def leaves(self, index: int) -> None:
        """It gets nothing new from here on."""
        self.at(index).leaving = True
        self._leaving[index] = None
        self.changes += 1
        self.waiting.leave(index)

    def replica_lost(self, index: int) -> None:
        if index in self._rows:
            self.serves(index, None)
            self.changes += index in self._leaving
            del self._rows[index]
        self._leaving.pop(index, None)
        self._starting.discard(index)
        self.waiting.leave(index)

    # ---- what is known -------------------------------------------------------------------------------------

    def leaving(self) -> list[int]:
        """Those that leave and have not left yet."""
        return list(self._leaving)

    def without_work(self) -> list[int]:
        """Those that ask for work, and those that are starting; ascending."""
        return sorted(self._starting.union(self.waiting))

    def served(self) -> Collection[int]:
        """The ids of all weights that some replica serves, of several the newest."""
        return self._served.keys()

    def held(self) -> set[int]:
        """refresh=versions: the ids of all weights that some replica generates with. A pass over all."""
        return {weight_id for row in self._rows.values() for weight_id in row.held}
