"""A connection to SQLite that keeps what it writes, so that the same can be written elsewhere."""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

_READING = ("SELECT", "PRAGMA", "EXPLAIN", "BEGIN", "COMMIT", "ROLLBACK", "VALUES")
_UNREPEATABLE = {"random", "randomblob", "date", "time", "datetime", "julianday", "strftime", "unixepoch"}
_UNREPEATABLE |= {"current_date", "current_time", "current_timestamp", "last_insert_rowid", "changes"}


class RecordedConnection(sqlite3.Connection):
    """Keeps the writing statements of the open transaction in `written`, whoever executes them and how."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.written: list[tuple[str, Any]] = []
        self._reads: dict[str, bool] = {}
        self.set_authorizer(_refuse_unrepeatable)

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(_RecordedCursor)

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self.cursor().execute(sql, parameters)

    def executemany(self, sql: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        return self.cursor().executemany(sql, rows)

    def executescript(self, script: str) -> sqlite3.Cursor:
        raise sqlite3.NotSupportedError("a script commits by itself: execute its statements one by one")

    def writes(self, sql: str) -> bool:
        """Whether it is to be kept. Called before each statement."""
        if sql not in self._reads:
            self._reads[sql] = sql.lstrip().upper().startswith(_READING)
        if not self._reads[sql] and not self.in_transaction:
            raise sqlite3.ProgrammingError(f"a write outside a transaction is not in the journal: {sql}")
        return not self._reads[sql]


class _RecordedCursor(sqlite3.Cursor):
    connection: RecordedConnection

    def execute(self, sql: str, parameters: Any = ()) -> "_RecordedCursor":
        writes = self.connection.writes(sql)
        super().execute(sql, parameters)
        if writes:
            self.connection.written.append((sql, parameters))
        return self

    def executemany(self, sql: str, rows: Iterable[Any]) -> "_RecordedCursor":
        self.connection.writes(sql)  # of reading ones SQLite refuses many
        super().executemany(sql, self._noted(sql, rows))
        return self

    def _noted(self, sql: str, rows: Iterable[Any]) -> Iterator[Any]:
        """The rows; each is kept when the next one is asked for: then it has been written."""
        for parameters in rows:
            yield parameters
            self.connection.written.append((sql, parameters))

    def executescript(self, script: str) -> "_RecordedCursor":
        self.connection.executescript(script)
        return self


def _refuse_unrepeatable(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    unrepeatable = action == sqlite3.SQLITE_FUNCTION and name is not None and name.lower() in _UNREPEATABLE
    return sqlite3.SQLITE_DENY if unrepeatable else sqlite3.SQLITE_OK
