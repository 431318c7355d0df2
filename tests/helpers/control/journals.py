"""A store with its journal as two machines see it: shared storage and a local disk for each."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.store import journal
from laminar_hpc.store.journal import Journal
from laminar_hpc.store.rebuild import build
from laminar_hpc.store.recovery import settle
from laminar_hpc.store.store import Store


class Place:
    """`lines`: what the user is told."""

    def __init__(self, root: Path) -> None:
        self.root, self.lines = root, list[str]()
        self.folder = root / "run" / journal.FOLDER
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    def path(self, machine: str = "a") -> Path:
        return self.root / machine / "store.sqlite"

    def start(
        self,
        machine: str = "a",
        era: int = 0,
        is_sure: Callable[[], bool] = lambda: True,
        assure: Callable[[], None] = lambda: None,
    ) -> Store:
        """As a controller does it."""
        path = self.path(machine)
        settle(self.folder, path, self.lines.append, era=era)
        written = Journal(self.folder, path, self.lines.append, era, is_sure)
        return Store(path.parent, journal=written, assure=assure)

    def write(self, *numbers: int, machine: str = "a") -> None:
        """A controller's life with a transaction for each number."""
        store = self.start(machine)
        for number in numbers:
            transaction(store, number)
        store.close()

    def rebuilt(self) -> dict[str, list]:
        """What the journal alone knows."""
        target = self.root / "rebuilt.sqlite"
        build(self.folder, target)
        return tables(target)

    def last(self) -> Path:
        """The newest segment."""
        return sorted(self.folder.glob("segment_*"))[-1]

    def copy(self, name: str) -> "Place":
        shutil.copytree(self.root, self.root.with_name(name))
        return Place(self.root.with_name(name))


def transaction(store: Store, number: int, size: int = 2000) -> None:
    """One that tells from its content which it is; `size`: bytes of its prompt."""
    store.rows.add_group(number, number, 0, 0, number + 1, float(number))
    store.rows.add_trajectories(range(number, number + 1), number, 0, None, 0, 0)
    payload = bytes([number % 256]) * size
    store._db.execute("INSERT INTO prompts VALUES(?, ?)", (number, payload))
    store.rows.consume([number], number)
    store.put("last", number)
    store.commit()


def tables(path: Path) -> dict[str, list]:
    """All that a store holds, but for its mark in the journal."""
    db = sqlite3.connect(path)
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    held = {name: sorted(db.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}
    db.close()
    held["meta"] = [row for row in held.get("meta", []) if row[0] != journal.MARK]
    return held


def groups(held: dict[str, list]) -> list[int]:
    return sorted(row[0] for row in held.get("groups", []))
