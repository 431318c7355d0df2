"""The tables of a store, the number of their layout, by which a store of another version is refused, and how
a store is opened only to be read."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from laminar_hpc.config.errors import LaminarError

LAYOUT = "3"  # in the table meta, which tells stores of other versions apart
BOUND = "bound of step "  # in the table meta, before a step: the staleness bound of its weights, if it adapts
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS weights(
  id INTEGER PRIMARY KEY, restore_epoch INTEGER, step INTEGER, published_at REAL);
CREATE TABLE IF NOT EXISTS groups(
  id INTEGER PRIMARY KEY, prompt_index INTEGER, state TEXT,
  weight_id INTEGER, weight_step INTEGER, number INTEGER,
  granted_at REAL, finished_at REAL, finish_order INTEGER,
  consumed_step INTEGER, reason TEXT);
CREATE TABLE IF NOT EXISTS trajectories(
  id INTEGER PRIMARY KEY, group_id INTEGER, sample_index INTEGER, attempt INTEGER, state TEXT,
  replica INTEGER, weight_id INTEGER, weight_step INTEGER, step_finished INTEGER, consumed_step INTEGER,
  response_length INTEGER, reward REAL, accuracy REAL, finish_reason TEXT, reward_error TEXT,
  time_started REAL, time_finished REAL, time_scored REAL,
  trained INTEGER, policies INTEGER, moves INTEGER, digest TEXT, score BLOB);
CREATE TABLE IF NOT EXISTS prompts(group_id INTEGER PRIMARY KEY, tokens BLOB);
CREATE TABLE IF NOT EXISTS responses(
  trajectory_id INTEGER PRIMARY KEY, file TEXT, offset INTEGER, size INTEGER);
CREATE TABLE IF NOT EXISTS mismatches(
  trajectory_id INTEGER PRIMARY KEY, mean REAL, minibatches_ahead INTEGER);
CREATE TABLE IF NOT EXISTS left_out(trajectory_id INTEGER PRIMARY KEY, why TEXT);
CREATE TABLE IF NOT EXISTS old_steps(
  consumed_step INTEGER PRIMARY KEY, trajectories INTEGER, tokens INTEGER, reward_errors INTEGER,
  id_sum INTEGER, digest_sum TEXT);
CREATE TABLE IF NOT EXISTS evaluated(
  evaluation TEXT, response INTEGER, weight_id INTEGER, score REAL, length INTEGER,
  PRIMARY KEY(evaluation, response)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS received(identity TEXT PRIMARY KEY, seq INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seals(kind TEXT, a, b, digest, PRIMARY KEY(kind, a, b)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS trajectories_by_group ON trajectories(group_id);
CREATE INDEX IF NOT EXISTS groups_by_state_and_step ON groups(state, consumed_step);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(consumed_step);
"""


def has_tables(db: sqlite3.Connection, path: Path) -> bool:
    """False of a store that is just being made. Raises LaminarError for one whose tables mean something else,
    among them those that do not name their layout."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'trajectories'").fetchone():
        return False
    found = meta(db, "layout") or "1"
    if found != LAYOUT:
        cure = "use it with that version, or choose another run_dir"
        text = f"was written by another version of laminar_hpc (layout {found}, not {LAYOUT})"
        raise LaminarError(f"{path} {text}; {cure}")
    return True


def meta(db: sqlite3.Connection, key: str) -> str:
    """A value of the table meta; "" where there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else ""


def bounds_in(rows: Iterable[tuple[str, str]]) -> dict[int, int]:
    """The staleness bounds among rows of the table meta, by the step of the weights."""
    return {int(key.removeprefix(BOUND)): int(value) for key, value in rows if key.startswith(BOUND)}


def connect_read_only(path: Path, seconds: float = 5.0) -> sqlite3.Connection:
    """Opens a store, perhaps one that a controller writes, only to read it, and without making a file if that
    can be avoided. Any thread may use the connection. `seconds`: the wait for a lock of the writer. Raises
    sqlite3.Error."""
    # without a write-ahead log SQLite need not create files of its own to read
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    uri = f"{path.resolve().as_uri()}?{how}"
    return sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False)
