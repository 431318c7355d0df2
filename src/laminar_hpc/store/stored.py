"""Scored trajectories as the store has them, for the controller's batches and for reports: everything but
their columns, which are in payload files."""

import sqlite3
from collections.abc import Iterable

from laminar_hpc.line.messages.data import ResponsePlace, Trajectory
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.line.messages.wire import decode_score

_COLUMNS = (
    "id, group_id, attempt, replica, weight_id, weight_step, response_length, trained, policies, "
    "finish_reason, time_started, time_finished, step_finished"
)
_SELECT = (
    f"SELECT moves, digest, score, file, offset, size, {_COLUMNS} FROM trajectories "
    "JOIN responses ON trajectory_id = id WHERE score IS NOT NULL"
)


def stored_groups(db: sqlite3.Connection, group_ids: Iterable[int]) -> list[BatchGroup]:
    """In this order, with the scored trajectories of each in sample order; without groups that have none."""
    groups = list[BatchGroup]()
    for group_id in group_ids:
        rows = db.execute(f"{_SELECT} AND group_id = ? ORDER BY sample_index", (group_id,)).fetchall()
        if rows:
            groups.append(BatchGroup(group_id, _prompt(db, group_id), [_record(row) for row in rows]))
    return groups


def stored_trajectories(db: sqlite3.Connection, ids: Iterable[int]) -> list[BatchGroup]:
    """Each of these, where it is scored, with its prompt; in the order of the ids."""
    found = (db.execute(f"{_SELECT} AND id = ?", (i,)).fetchone() for i in sorted(ids))
    records = [_record(row) for row in found if row is not None]
    return [BatchGroup(record.group_id, _prompt(db, record.group_id), [record]) for record in records]


def _prompt(db: sqlite3.Connection, group_id: int) -> bytes:
    row = db.execute("SELECT tokens FROM prompts WHERE group_id = ?", (group_id,)).fetchone()
    return row[0] if row else b""


def _record(row: tuple) -> Trajectory:
    moves, digest, score, file, offset, size, *columns = row
    record, scored = Trajectory(*columns), decode_score(score)
    record.time_scored = scored.time_scored
    record.reward = scored.reward
    record.reward_parts = scored.reward_parts
    record.reward_error = scored.reward_error
    record.moves = moves
    record.digest = digest
    record.place = ResponsePlace(file, offset, size)
    return record
