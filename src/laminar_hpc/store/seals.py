"""The seal of each row of the store: a digest of all its columns, written in the transaction that changes the
row. `laminar audit` names every row that does not have its seal.

A seal proves that nobody but the run has written a row; it is no signature: who can write the store can also
write a seal. A column that is added to a table is sealed without a word here. Two tables have no seals:
`seals` itself, whose rows are held against the rows that they seal, and `responses`, whose places are held
against the digests in the payload files. The seal of a prompt stays when the prompt has left for the archive.
"""

import sqlite3
from hashlib import blake2b

import msgspec

from laminar_hpc.store.journal import MARK

ALL_SEALED = "sealed"  # in the table meta of a store that has had seals from its first row on
ARCHIVE = "archive"  # seals of this kind are of the archive's files, by step from 1
PROMPTS = "prompts"
UNSEALED_KEY = MARK  # in meta: written behind the seals, and checked against the journal at each start
_UNSEALED = {"seals", "responses"}
_encode = msgspec.msgpack.Encoder().encode


def seal_of(row: tuple) -> int:
    """Of all columns of a row, in the order of its table."""
    return int.from_bytes(blake2b(_encode(row), digest_size=8).digest(), "little", signed=True)


def sealed_tables(cursor: sqlite3.Cursor) -> dict[str, list[str]]:
    """Name -> the columns of its primary key, one or two."""
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
    """The columns a and b of a row's seal, in SQL."""
    names = [f"{row}{key}" for key in keys]
    return ", ".join(names if len(names) == 2 else [*names, "''"])


class Seals:
    """Of one connection that writes: notes which rows the open transaction changes."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """In the transaction that makes the tables, before any row is written."""
        # what that executes is not for the journal
        self._db = db
        self._beside = sqlite3.Cursor(db)
        self._select = dict[str, str]()
        self._beside.execute("CREATE TEMP TABLE touched(kind, a, b)")
        for table, keys in sealed_tables(self._beside).items():
            second = f"{keys[1]} = ?" if len(keys) == 2 else "? = ''"
            self._select[table] = f"SELECT * FROM {table} WHERE {keys[0]} = ? AND {second}"
            for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                but = f"WHEN {row}.key != '{UNSEALED_KEY}'" if table == "meta" else ""
                self._beside.execute(
                    f"CREATE TEMP TRIGGER {event}_{table} AFTER {event} ON main.{table} {but} BEGIN "
                    f"INSERT INTO touched VALUES('{table}', {key_of(keys, f'{row}.')}); END"
                )

    def write(self) -> None:
        """As the last thing of a transaction."""
        sealed, gone = [], []
        for kind, a, b in self._beside.execute("SELECT DISTINCT kind, a, b FROM touched").fetchall():
            row = self._beside.execute(self._select[kind], (a, b)).fetchone()
            if row is not None:
                sealed.append((kind, a, b, seal_of(row)))
            elif kind != PROMPTS:
                gone.append((kind, a, b))
        if sealed or gone:
            self._db.executemany("INSERT OR REPLACE INTO seals VALUES(?, ?, ?, ?)", sealed)
            self._db.executemany("DELETE FROM seals WHERE kind = ? AND a = ? AND b = ?", gone)
            self._beside.execute("DELETE FROM touched")

    def seal_archived(self, step: int, digest: str) -> None:
        """The archive's file of trainer step `step`, from 1, with its SHA-256 in hexadecimal."""
        self._db.execute("INSERT OR REPLACE INTO seals VALUES(?, ?, '', ?)", (ARCHIVE, step, digest))
