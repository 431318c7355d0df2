"""The seal of a row of the store is a digest of all its columns, written in the transaction that changes the
row. `laminar audit` names every row that does not match its seal.

A seal proves that only the run has written a row. It is no signature: whoever can write to the store can
also write a seal. A new column of a table needs no change here. Two tables have no seals: the audit checks
the rows of `seals` against the rows that they seal, and those of `responses` against the digests in the
payload files. The seal of a prompt stays when the prompt itself has moved to the archive.
"""

import sqlite3
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from laminar_hpc.store.journal import MARK

ALL_SEALED = "sealed"  # in the table meta of a store that has had seals from its first row on
ARCHIVE = "archive"  # seals of this kind are of the archive's files, by step from 1
PROMPTS = "prompts"
RECEIVED = "received"  # the one table whose rows are not read back to be sealed
UNSEALED_KEY = MARK  # in meta: written behind the seals, and checked against the journal at each start
_UNSEALED = {"seals", "responses"}
_encode = msgspec.msgpack.Encoder().encode


def seal_of(row: tuple) -> int:
    """The digest of all columns of a row, in the order of its table."""
    return int.from_bytes(blake2b(_encode(row), digest_size=8).digest(), "little", signed=True)


def sealed_tables(cursor: sqlite3.Cursor) -> dict[str, list[str]]:
    """The tables whose rows have seals: by name, the one or two columns of the primary key."""
    sql = (
        "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table' "
        "AND c.pk ORDER BY m.name, c.pk"
    )
    found: dict[str, list[str]] = {}
    for table, column in cursor.execute(sql).fetchall():
        if table not in _UNSEALED and not table.startswith("sqlite_"):
            found.setdefault(table, []).append(column)
    return found


def key_of(keys: list[str], row: str = "") -> str:
    """The SQL of the columns a and b of a row's seal."""
    names = [f"{row}{key}" for key in keys]
    return ", ".join(names if len(names) == 2 else [*names, "''"])


class Seals:
    """Notes which rows the open transaction of a connection changes, and seals them at its end."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Called in the transaction that makes the tables, before any row is written."""
        # what that executes is not for the journal
        self._db = db
        self._beside = sqlite3.Cursor(db)
        self._select = dict[str, str]()  # by table, the rows to be sealed
        self._sealed: list[tuple] = []
        for table, keys in sealed_tables(self._beside).items():
            if table == RECEIVED:
                continue
            self._beside.execute(f"CREATE TEMP TABLE touched_{table}(a, b)")
            touched = f"(SELECT DISTINCT a, b FROM touched_{table}) n"
            same = " AND ".join(f"t.{key} = n.{of}" for key, of in zip(keys, "ab", strict=False))
            self._select[table] = f"SELECT n.*, t.* FROM {touched} LEFT JOIN {table} t ON {same}"
            for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                but = f"WHEN {row}.key != '{UNSEALED_KEY}'" if table == "meta" else ""
                self._beside.execute(
                    f"CREATE TEMP TRIGGER {event}_{table} AFTER {event} ON main.{table} {but} BEGIN "
                    f"INSERT INTO touched_{table} VALUES({key_of(keys, f'{row}.')}); END"
                )

    def write(self) -> None:
        """Seals the rows that have changed; nothing but the journal's mark is written behind it."""
        sealed = self._sealed
        self._sealed = []
        gone = []
        for kind, select in self._select.items():
            rows = self._beside.execute(select).fetchall()
            if not rows:
                continue
            self._beside.execute(f"DELETE FROM touched_{kind}")
            for a, b, *row in rows:
                if row[0] is not None:
                    sealed.append((kind, a, b, seal_of(row)))
                elif kind != PROMPTS:
                    gone.append((kind, a, b))
        self._db.executemany("INSERT OR REPLACE INTO seals VALUES(?, ?, ?, ?)", sealed)
        self._db.executemany("DELETE FROM seals WHERE kind = ? AND a = ? AND b = ?", gone)

    def seal_received(self, rows: Iterable[tuple[str, int]]) -> None:
        """Seals whole rows of the table `received`, which are most of what many turns write."""
        self._sealed += [(RECEIVED, row[0], "", seal_of(row)) for row in rows]

    def seal_archived(self, step: int, digest: str) -> None:
        """Seals the archive's file of trainer step `step`, from 1, by its SHA-256 in hexadecimal."""
        self._db.execute("INSERT OR REPLACE INTO seals VALUES(?, ?, '', ?)", (ARCHIVE, step, digest))
