"""A connection that only reads a store, perhaps one that a controller writes. Makes no file where it can."""

import sqlite3
from pathlib import Path


def connect_read_only(path: Path, seconds: float = 5.0) -> sqlite3.Connection:
    """Any thread may use it. `seconds`: for a lock of the writer to go. Raises sqlite3.Error."""
    # without a write-ahead log SQLite need not create files of its own to read
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    uri = f"{path.resolve().as_uri()}?{how}"
    return sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False)
