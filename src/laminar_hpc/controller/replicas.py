"""What the controller knows of each replica, beside its membership."""

from dataclasses import dataclass

from laminar_hpc.messages.data import ReplicaLoad
from laminar_hpc.messages.rollouts import RequestWork


@dataclass
class Replica:
    """All of its present life."""

    weight_id: int | None = None  # of the verified weights that it serves
    newest_batch: int | None = None  # the id of the newest local batch that it was granted
    report: ReplicaLoad | None = None  # its newest one, from its pings
    report_is_outdated: bool = False  # it has refused a trajectory that the report had room for
    rejoins: bool = False  # it has not said yet what it holds: nothing is granted, what it asked is void
    leaving: bool = False  # it was told to end: it is given nothing new

    @property
    def current_report(self) -> ReplicaLoad | None:
        return None if self.report_is_outdated else self.report


class Replicas:
    """By index. A row begins with the first message of a replica's life and ends with `forget`."""

    def __init__(self) -> None:
        self._rows: dict[int, Replica] = {}
        self.waiting: dict[int, RequestWork] = {}  # without work, in the order in which they asked
        self.pull_seconds = 0.0  # of the newest pull

    def at(self, index: int) -> Replica:
        return self._rows.setdefault(index, Replica())

    def rows(self) -> dict[int, Replica]:
        return self._rows

    def reported(self, index: int, report: ReplicaLoad) -> None:
        row = self.at(index)
        row.report, row.report_is_outdated = report, False

    def asks(self, index: int, request: RequestWork) -> None:
        """A request that a grant crossed on its way is void; the weights that it names are served."""
        row = self.at(index)
        if row.rejoins:
            return
        row.weight_id = request.weight_id  # known anew of a replica that was taken for dead
        crossed = row.newest_batch is not None and request.newest_batch != row.newest_batch
        if not crossed and not row.leaving:
            self.waiting[index] = request

    def granted(self, index: int, batch_id: int) -> None:
        self.at(index).newest_batch = batch_id
        self.waiting.pop(index, None)

    def leaves(self, index: int) -> None:
        """It gets nothing new from here on."""
        self.at(index).leaving = True
        self.waiting.pop(index, None)

    def leaving(self) -> list[int]:
        """Those that leave and have not left yet."""
        return [index for index, row in self._rows.items() if row.leaving]

    def forget(self, index: int) -> None:
        self._rows.pop(index, None)
        self.waiting.pop(index, None)

    def served(self) -> set[int]:
        """The ids of all weights that some replica serves."""
        return {row.weight_id for row in self._rows.values() if row.weight_id is not None}

    def waiting_on(self) -> dict[int, int]:
        """The weight id that each replica without work serves."""
        return {index: request.weight_id for index, request in self.waiting.items()}
