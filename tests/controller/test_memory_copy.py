"""The store's second copy in memory follows what SQLite writes into its log."""

import os
import random
import sqlite3
from contextlib import closing

import pytest

from laminar_hpc.store.memory_copy import MemoryCopy


@pytest.mark.parametrize("seed", range(6))
def test_the_copy_is_the_file_as_of_the_last_commit(tmp_path, seed):
    """Promise: docs/promises.md#store-harmed. Whatever is committed or rolled back, however often SQLite
    checkpoints, shrinks the file or begins its log again, and while others read."""
    draw, path = random.Random(seed), tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA wal_autocheckpoint={draw.choice([1, 5, 50, 1000])}")
        db.execute(f"PRAGMA cache_size={draw.choice([10, 2000])}")  # few pages spill into the log
        if seed % 3:
            db.execute("CREATE TABLE earlier(a)")
        copy, reader = MemoryCopy(db, path), sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        for _ in range(30):
            db.execute("BEGIN IMMEDIATE")
            db.execute("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, x BLOB)")
            for _ in range(draw.choice([0, 1, 300])):
                row = draw.randrange(2000), os.urandom(draw.randrange(500))
                db.execute("INSERT OR REPLACE INTO t VALUES(?, ?)", row)
            if draw.random() < 0.1:
                db.execute("DELETE FROM t")
            db.execute(draw.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))
            for sql in ("PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM"):
                if draw.random() < 0.05:
                    db.execute(sql).fetchall()
            copy.follow()
            if reader.in_transaction:
                reader.rollback()
            elif draw.random() < 0.5:
                reader.execute("BEGIN")
            reader.execute("SELECT * FROM sqlite_master").fetchall()
        reader.close()
        behind = MemoryCopy(db, path)  # begins where a log is there
        db.execute("CREATE TABLE later(a)")
        for each in (copy, behind):
            each.follow()
            each.write(tmp_path / "again.sqlite")
            assert (tmp_path / "again.sqlite").read_bytes() == db.serialize()
            each.close()
