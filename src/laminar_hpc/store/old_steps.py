"""Steps that were archived long ago, of whose trajectories the store keeps sums alone: so it does not grow
with the trajectories of a run.

The rows of the newest ROWS_MAX trajectories or more stay, whatever was archived; of older archived steps one
row of sums. Their groups stay on record: a restore that goes so far back needs their admission numbers, and
has all else from the archive (`bring_back`).
"""

import sqlite3
from collections.abc import Iterable

from laminar_hpc.line.messages.data import ScorePart, Trajectory
from laminar_hpc.line.messages.wire import encode
from laminar_hpc.policies.metrics import accuracy
from laminar_hpc.store.store_layout import meta

ROWS_MAX = 1_000_000  # some 400 MB
_GROUPS_AT_ONCE = 64  # in one turn of the controller
GIVEN_UP = -1  # in the place of a step: trajectories of groups that were given up
_FIRST_GIVEN_UP, _NEXT = "given_up_rows_from", "next_trajectory"  # in the table meta
_DIGEST_BITS = 128


def digest_sum(digests: Iterable[str]) -> int:
    """Adds up digests in hexadecimal; their order does not matter."""
    return sum(int(digest, 16) for digest in digests) % (1 << _DIGEST_BITS)


class OldSteps:
    """Inside the store's open transaction, as all of store/store.py."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def next_trajectory(self) -> int:
        """The next free trajectory id, also where the rows of the last ones are gone."""
        known = int(meta(self._db, _NEXT) or 0)
        [(last,)] = self._db.execute("SELECT COALESCE(MAX(id), -1) FROM trajectories")
        return max(known, last + 1)

    def rows(self) -> int:
        """How many trajectories have one: ids are given in a row."""
        [(gone,)] = self._db.execute("SELECT COALESCE(SUM(trajectories), 0) FROM old_steps")
        return self.next_trajectory() - gone

    def trim(self, archived: int) -> bool:
        """Lets some rows go, of the oldest of the first `archived` steps. Whether there may be more."""
        if self.rows() <= ROWS_MAX:
            return False
        [(last,)] = self._db.execute("SELECT MAX(consumed_step) FROM old_steps WHERE consumed_step >= 0")
        first = 0 if last is None else last
        for step in range(first, min(first + 2, archived)):
            if groups := self._groups(step):
                self._let_go(step, groups)
                self._let_go(GIVEN_UP, self._given_up(groups[-1]))
                return True
        return False

    def _groups(self, step: int) -> list[int]:
        """The first of those that the step trained whose trajectories have rows."""
        sql = (
            "SELECT id FROM groups WHERE state = 'consumed' AND consumed_step = ? "
            "AND EXISTS(SELECT 1 FROM trajectories WHERE group_id = groups.id) ORDER BY id LIMIT ?"
        )
        return [group for (group,) in self._db.execute(sql, (step, _GROUPS_AT_ONCE))]

    def _given_up(self, before: int) -> list[int]:
        """The next ones that were granted before group `before`."""
        sql = (
            "SELECT id FROM groups WHERE state = 'given_up' AND consumed_step IS NULL AND id >= ? AND id < ? "
            "ORDER BY id LIMIT ?"
        )
        first = int(meta(self._db, _FIRST_GIVEN_UP) or 0)
        found = self._db.execute(sql, (first, before, 4 * _GROUPS_AT_ONCE))
        groups = [group for (group,) in found]
        if groups:
            self._put(_FIRST_GIVEN_UP, groups[-1] + 1)
        return groups

    def _let_go(self, step: int, groups: list[int]) -> None:
        """Adds the trajectories of these groups to the sums of the step, and removes their rows. Not all that
        were given up have had a response."""
        columns = "SELECT id, response_length, reward_error, digest FROM trajectories WHERE group_id = ?"
        found = [row for group in groups for row in self._db.execute(columns, (group,))]
        if not found:
            return
        self._put(_NEXT, self.next_trajectory())
        count, tokens, errors, ids, digests = self.sums(step)
        count, tokens = count + len(found), tokens + sum(row[1] or 0 for row in found)
        errors, ids = errors + sum(bool(row[2]) for row in found), ids + sum(row[0] for row in found)
        digests = (digests + digest_sum(row[3] for row in found if row[3])) % (1 << _DIGEST_BITS)
        row = (step, count, tokens, errors, ids, f"{digests:032x}")
        self._db.execute("INSERT OR REPLACE INTO old_steps VALUES(?, ?, ?, ?, ?, ?)", row)
        for table in ("mismatches", "left_out", "responses"):
            sql = f"DELETE FROM {table} WHERE trajectory_id = ?"
            self._db.executemany(sql, [(row[0],) for row in found])
        self._db.executemany("DELETE FROM prompts WHERE group_id = ?", [(group,) for group in groups])
        self._db.executemany("DELETE FROM trajectories WHERE group_id = ?", [(group,) for group in groups])

    def sums(self, step: int) -> tuple[int, int, int, int, int]:
        """Trajectories, response tokens, reward errors, the sum of the ids and that of the digests."""
        sql = (
            "SELECT trajectories, tokens, reward_errors, id_sum, digest_sum FROM old_steps "
            "WHERE consumed_step = ?"
        )
        row = self._db.execute(sql, (step,)).fetchone()
        return (0, 0, 0, 0, 0) if row is None else (*row[:4], int(row[4], 16))

    # ---- back ----------------------------------------------------------------------------------------------

    def bring_back(self, t: Trajectory, sample_index: int, step: int) -> None:
        """The row of a trajectory that step `step` has trained, where it is gone."""
        score = ScorePart(t.time_scored, t.reward, t.reward_parts, t.reward_error)
        origin = (t.trajectory_id, t.group_id, sample_index, t.attempt, t.replica, t.weight_id, t.weight_step)
        scored = (t.reward, accuracy(t.reward, t.reward_parts), t.reward_error, t.time_scored, encode(score))
        self._db.execute(
            "INSERT OR IGNORE INTO trajectories(id, group_id, sample_index, attempt, replica, weight_id, "
            "weight_step, reward, accuracy, reward_error, time_scored, score, state, consumed_step, "
            "step_finished, response_length, finish_reason, time_started, time_finished, trained, policies, "
            "moves, digest) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'consumed', "
            "?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(*origin, *scored, step, t.step_finished, t.length, t.finish_reason),
                *(t.time_started, t.time_finished, t.trained, t.policies, t.moves, t.digest),
            ),
        )

    def forget_sums(self, step: int) -> None:
        """Of `step` and later ones, whose trajectories have their rows again."""
        self._db.execute("DELETE FROM old_steps WHERE consumed_step >= ?", (step,))

    def _put(self, key: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, str(value)))
