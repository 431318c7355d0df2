"""What the experience buffer holds, and the run's memory: one SQLite file, written by the controller only.

WAL with synchronous=FULL: what is committed survives a power cut. The loop commits once per turn, before it
sends anything. With `store_dir` the journal has it first and is what survives, also the loss of the machine;
the store's own file then syncs at its checkpoints only.
States of a trajectory: granted -> generated -> finished -> consumed(step), or given_up(reason). A response is
in a payload file (store/payload/), and only its place is here; when the archive has it, not even that. Of
steps that were archived long ago there are sums in place of trajectories (old_steps.py). Of all else nothing
is deleted.

Memory has a second copy, as of the last commit (memory_copy.py). If somebody else removes the file or writes
into it, the next turn finds that and makes the file again from the copy.
"""

import logging
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.check import check_store_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.observability import console
from laminar_hpc.store.full_disk import is_full_disk
from laminar_hpc.store.journal import RUN_DIR, Journal
from laminar_hpc.store.memory_copy import MemoryCopy
from laminar_hpc.store.old_steps import OldSteps
from laminar_hpc.store.payload.writer import FOLDER as PAYLOADS
from laminar_hpc.store.recorded import RecordedConnection
from laminar_hpc.store.recovery import move_aside
from laminar_hpc.store.rows import Rows
from laminar_hpc.store.seals import ALL_SEALED, Seals
from laminar_hpc.store.store_check import damage_of
from laminar_hpc.store.store_layout import BOUND, LAYOUT, SCHEMA, bounds_in, has_tables, meta

log = logging.getLogger(__name__)
_CHECK_SECONDS = 5.0  # of a turn, for a look at the whole file


class Store:
    """All SQL of the controller, with `rows` (rows.py) and `old_steps`. Every method works inside the open
    transaction; `commit` ends it."""

    def __init__(
        self,
        directory: Path,
        read_only: bool = False,
        journal: Journal | None = None,
        assure: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`read_only`: that of another run, which may be a live one, for a replay; only `rows`, to be read,
        `archived_steps` and `run_dir` work. `journal`: gets each transaction first. `assure` raises an error
        in a controller that was replaced: see `commit`. `say`: gets a line when the file was made again."""
        self.path = directory / "store.sqlite"
        self._journal = journal
        self.assure = assure
        self._say = say
        self._log = self.path.with_name(f"{self.path.name}-wal")
        try:
            if read_only:
                uri = f"{self.path.resolve().as_uri()}?mode=ro"
                self._db = sqlite3.connect(uri, uri=True, isolation_level=None)
                self._db.execute("SELECT 1 FROM groups LIMIT 1").fetchone()
                self._refuse_other_layouts()
                self.rows = Rows(self._db)
                return
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_store_directory(directory)
            factory = (
                RecordedConnection if journal else sqlite3.Connection
            )  # what it keeps is for the journal
            self._db = sqlite3.connect(self.path, isolation_level=None, factory=factory)
            is_new = not self._refuse_other_layouts()
            self.rows = Rows(self._db)
            self.old_steps = OldSteps(self._db)
            self._begin()
            if is_new:
                self.put_text(ALL_SEALED, "1")
            self._db.execute("INSERT OR IGNORE INTO meta VALUES('layout', ?)", (LAYOUT,))
            if journal:
                self.put_text(RUN_DIR, str(journal.run_dir))
            # made with the store: tells it from every other one
            self._db.execute("INSERT OR IGNORE INTO meta VALUES('store_id', ?)", (secrets.token_hex(8),))
            self.store_id = self.get_text("store_id")
        except sqlite3.DatabaseError as error:
            if is_full_disk(error):
                raise
            cure = "restore it from a copy" if read_only else "move it away or choose another run_dir"
            raise LaminarError(f"{self.path} cannot be used as the store ({error}); {cure}") from None

    def _begin(self) -> None:
        """Prepares a connection that was just opened."""
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA temp_store=MEMORY")  # of what the seals note
        # what a power cut takes from the store is in the journal
        self._db.execute(f"PRAGMA synchronous={'NORMAL' if self._journal else 'FULL'}")
        self._copy = MemoryCopy(self._db, self.path)
        self._db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            self._db.execute(statement)
        self.seals, self._known = Seals(self._db), self._files()

    def _refuse_other_layouts(self) -> bool:
        """Whether it has tables. Raises LaminarError for a store whose tables mean something else."""
        try:
            return has_tables(self._db, self.path)
        except LaminarError:
            self._db.close()
            raise

    @property
    def run_dir(self) -> Path:
        """Whose payload files hold the responses: where the store lies, or with `store_dir` the run's own."""
        if self._journal:  # the store itself knows it from its first transaction on
            return self._journal.run_dir
        here = self.path.resolve().parent
        return here if (here / PAYLOADS).is_dir() else Path(self.get_text(RUN_DIR) or here)

    def commit(self) -> None:
        """Raises OSError when the journal cannot be written. When it returns no other controller had begun
        to read at the time the transaction was in the journal: each successor knows it."""
        self._end_transaction()
        self._db.execute("BEGIN IMMEDIATE")

    def _end_transaction(self) -> None:
        self.seals.write()
        if self._journal and isinstance(self._db, RecordedConnection):
            self._journal.append(self._db)
            self._db.written.clear()
        self.assure()
        before = self._files()
        self._db.execute("COMMIT")
        after = self._files()
        if before == self._known and after[::3] == before[::3]:  # else `look` shall see it
            self._known = after
        self._copy.follow()

    # ---- harm from elsewhere -------------------------------------------------------------------------------

    def suspect(self) -> None:
        """The next look reads all of the file, a second per gigabyte."""
        self._known = (self._known[0], 0, *self._known[2:])

    def look(self) -> None:
        """Between two turns: makes the file again from memory where somebody else has removed or damaged it,
        and says so. Reads it if somebody has written into it."""
        now, known = self._files(), self._known
        if now == known:
            return
        if now[::3] != known[::3]:
            harm = "was removed or replaced"
        else:  # `damage_of` takes an empty file for a new store
            found = damage_of(self.path, _CHECK_SECONDS) if now[2] else "it is empty"
            harm = f"was damaged ({found})" if found else ""
        self._known = now
        if harm:
            self._make_again(harm)

    def _files(self) -> tuple[int, int, int, int]:
        """What others change who remove the file or its log, or write into the file."""
        try:
            file, log = self.path.stat(), self._log.stat()
            return file.st_ino, file.st_mtime_ns, file.st_size, log.st_ino
        except FileNotFoundError:
            return 0, 0, 0, 0

    def _make_again(self, harm: str) -> None:
        new = self.path.with_name(f".{self.path.name}.new")
        self._copy.write(new)
        if found := damage_of(new, _CHECK_SECONDS):
            text = f"{self.path} {harm}, and so was its copy in memory ({found})"
            raise LaminarError(f"{text}; restore it from a copy")
        self._copy.close()
        with suppress(sqlite3.Error):  # what it still writes goes into the file that is moved aside
            self._db.close()
        aside = move_aside(self.path)
        for left in (f"{self.path}-wal", f"{self.path}-shm"):
            Path(left).unlink(missing_ok=True)
        new.rename(self.path)
        durable.sync_folder(self.path.parent)
        type(self._db).__init__(self._db, self.path, isolation_level=None)  # for all that know it
        self._begin()
        moved = f"; what was there is now {aside}" if aside else ""
        text = f"{self.path} {harm} while the run used it, and was made again from memory: nothing is lost"
        self._say(console.line("warning", text + moved))

    def roll_back(self) -> None:
        """Forgets everything since the last commit; only `close` may follow."""
        if self._db.in_transaction:  # not after a full disk: SQLite has rolled back itself
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Commits and closes. Raises sqlite3.Error or OSError on a full disk; earlier commits are safe."""
        try:
            self.look()
            if self._db.in_transaction:
                self._end_transaction()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._db.close()
            self._copy.close()
            if self._journal:
                self._journal.close()

    # ---- counters ------------------------------------------------------------------------------------------

    def get(self, key: str, default: int) -> int:
        text = self.get_text(key)
        return int(text) if text else default

    def put(self, key: str, value: int) -> None:
        self.put_text(key, str(value))

    def get_text(self, key: str) -> str:
        """ "" where there is none."""
        return meta(self._db, key)

    def put_text(self, key: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO meta VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
            (key, value),
        )

    def knows(self, identity: str) -> bool:
        """Whether a message of this worker has arrived, at this controller or an earlier one."""
        return bool(self._db.execute("SELECT 1 FROM received WHERE identity = ?", (identity,)).fetchone())

    def received(self) -> dict[str, int]:
        """By identity of a worker, the number of its newest message (line/delivery.py) with effects here."""
        return dict(self._db.execute("SELECT identity, seq FROM received"))

    def note_received(self, numbers: dict[str, int]) -> None:
        """In the transaction that holds the effects of these messages."""
        self._db.executemany("INSERT OR REPLACE INTO received VALUES(?, ?)", numbers.items())
        self.seals.seal_received(numbers.items())

    def next_ids(self) -> tuple[int, int, int]:
        """The next free weight, group and trajectory ids; none is ever used twice."""
        tables = ("weights", "groups")
        columns = (f"(SELECT COALESCE(MAX(id) + 1, 0) FROM {table})" for table in tables)
        weights, groups = self._db.execute(f"SELECT {', '.join(columns)}").fetchone()
        return weights, groups, self.old_steps.next_trajectory()

    # ---- evaluations under way -----------------------------------------------------------------------------

    def note_evaluated(self, evaluation: str, response: int, weight_id: int, score: float, size: int) -> None:
        """A response of an evaluation was scored; `size`: its length in tokens."""
        row = (evaluation, response, weight_id, score, size)
        self._db.execute("INSERT OR REPLACE INTO evaluated VALUES(?, ?, ?, ?, ?)", row)

    def evaluated(self, evaluation: str, weight_id: int) -> list[tuple[int, float, int]]:
        """(response, score, length) of those to weights of this id."""
        columns = "SELECT response, score, length FROM evaluated"
        rows = self._db.execute(f"{columns} WHERE evaluation = ? AND weight_id = ?", (evaluation, weight_id))
        return rows.fetchall()

    def forget_evaluated(self, evaluation: str) -> None:
        """The evaluation's results are known, or it begins anew."""
        self._db.execute("DELETE FROM evaluated WHERE evaluation = ?", (evaluation,))

    # ---- weights -------------------------------------------------------------------------------------------

    def add_weights(self, weight_id: int, restore_epoch: int, step: int, time: float) -> None:
        self._db.execute("INSERT INTO weights VALUES(?, ?, ?, ?)", (weight_id, restore_epoch, step, time))

    def weight_steps(self) -> dict[int, int]:
        """The trainer step of each weight id."""
        return dict(self._db.execute("SELECT id, step FROM weights"))

    def note_start_of_trainers(self, first_id: int, step: int) -> None:
        """Trainers start on the weights of step `step`, and publish ids from `first_id` on."""
        self.put(f"restored {first_id}", step)

    def starts_of_trainers(self) -> list[tuple[int, int]]:
        """All of them, as (first_id, step) in order."""
        rows = self._db.execute("SELECT key, value FROM meta WHERE key LIKE 'restored %'")
        return sorted((int(key.removeprefix("restored ")), int(step)) for key, step in rows)

    # ---- staleness -----------------------------------------------------------------------------------------

    def note_bound(self, step: int, bound: int) -> None:
        """The staleness bound of the weights of step `step`, before anything is granted on them."""
        self.put(f"{BOUND}{step}", bound)

    def bounds(self) -> dict[int, int]:
        """All of them, by the step of the weights."""
        return bounds_in(self._db.execute("SELECT key, value FROM meta WHERE key LIKE ?", (f"{BOUND}%",)))

    # ---- archive -------------------------------------------------------------------------------------------

    @property
    def archived_steps(self) -> int:
        """So many steps, from the first one on, have left the payload files."""
        return self.get("archived_steps", 0)

    @archived_steps.setter
    def archived_steps(self, steps: int) -> None:
        self.put("archived_steps", steps)
