"""The rows of groups and of their trajectories, with prompts and the places of responses. States and tables:
store/store.py, store_layout.py."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from laminar_hpc.line.messages.data import ResponsePlace, Sample, ScorePart, Trajectory
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.line.messages.wire import decode_score, encode
from laminar_hpc.store.payload.layout import tokens_array

_COLUMNS = (
    "id, group_id, attempt, replica, weight_id, weight_step, response_length, trained, policies, "
    "finish_reason, time_started, time_finished, step_finished"
)
_SELECT = (
    f"SELECT moves, digest, score, file, offset, size, {_COLUMNS} FROM trajectories "
    "JOIN responses ON trajectory_id = id WHERE score IS NOT NULL"
)


class Rows:
    """Inside the store's open transaction, as all of store/store.py."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    # ---- granted, generated, finished, consumed ------------------------------------------------------------

    def add_group(
        self, group_id: int, prompt_index: int, weight_id: int, weight_step: int, number: int, time: float
    ) -> None:
        self._db.execute(
            "INSERT INTO groups VALUES(?, ?, 'granted', ?, ?, ?, ?, NULL, NULL, NULL, NULL)",
            (group_id, prompt_index, weight_id, weight_step, number, time),
        )

    def add_trajectories(
        self,
        ids: range,
        group_id: int,
        first_sample: int,
        replica: int | None,
        weight_id: int,
        weight_step: int,
    ) -> None:
        """More samples of a group, from `first_sample` on. `replica` None: nobody has them yet."""
        self._db.executemany(
            "INSERT INTO trajectories(id, group_id, sample_index, attempt, state, "
            "replica, weight_id, weight_step) VALUES(?, ?, ?, 0, 'granted', ?, ?, ?)",
            [(i, group_id, n, replica, weight_id, weight_step) for n, i in enumerate(ids, first_sample)],
        )

    def grant_again(
        self, trajectory_id: int, attempt: int, replica: int, weight_id: int, weight_step: int
    ) -> None:
        self._db.execute(
            "UPDATE trajectories SET attempt = ?, replica = ?, weight_id = ?, weight_step = ?, "
            "state = 'granted' WHERE id = ?",
            (attempt, replica, weight_id, weight_step, trajectory_id),
        )

    def add_prompt(self, group_id: int, tokens: Sequence[int]) -> None:
        """The group's prompt, as it goes out with every batch."""
        data = tokens_array(tokens).tobytes()
        self._db.execute("INSERT OR REPLACE INTO prompts VALUES(?, ?)", (group_id, data))

    def set_group_weights(self, group_id: int, weight_step: int) -> None:
        self._db.execute("UPDATE groups SET weight_step = ? WHERE id = ?", (weight_step, group_id))

    def store_response(self, t: Trajectory) -> None:
        """It has its last token, a place in a payload file, and no score yet."""
        assert t.place is not None
        origin = (t.attempt, t.replica, t.weight_id, t.weight_step, t.step_finished, t.moves)
        outcome = (t.length, t.trained, t.policies, t.finish_reason, t.digest)
        self._db.execute(
            "UPDATE trajectories SET state = 'generated', attempt = ?, replica = ?, "
            "weight_id = ?, weight_step = ?, step_finished = ?, moves = ?, response_length = ?, "
            "trained = ?, policies = ?, finish_reason = ?, digest = ?, "
            "time_started = ?, time_finished = ? WHERE id = ?",
            (*origin, *outcome, t.time_started, t.time_finished, t.trajectory_id),
        )
        self.put_back(t.trajectory_id, t.place)

    def lose_response(self, trajectory_id: int) -> None:
        """It cannot be read; the trajectory is to be granted again."""
        self._db.execute(
            "UPDATE trajectories SET state = 'granted', consumed_step = NULL, reward = NULL, "
            "accuracy = NULL, reward_error = NULL, time_scored = NULL, score = NULL WHERE id = ?",
            (trajectory_id,),
        )
        self._db.execute("DELETE FROM responses WHERE trajectory_id = ?", (trajectory_id,))

    def place(self, trajectory_id: int) -> ResponsePlace:
        """Returns where a stored response lies."""
        sql = "SELECT file, offset, size FROM responses WHERE trajectory_id = ?"
        return ResponsePlace(*self._db.execute(sql, (trajectory_id,)).fetchone())

    def finish_trajectory(self, trajectory_id: int, score: ScorePart, accuracy: float) -> None:
        self._db.execute(
            "UPDATE trajectories SET state = 'finished', reward = ?, accuracy = ?, reward_error = ?, "
            "time_scored = ?, score = ? WHERE id = ?",
            (score.reward, accuracy, score.reward_error, score.time_scored, encode(score), trajectory_id),
        )

    def finish_group(self, group_id: int, weight_step: int, order: int, time: float) -> None:
        self._db.execute(
            "UPDATE groups SET state = 'finished', weight_step = ?, "
            "finish_order = ?, finished_at = ? WHERE id = ?",
            (weight_step, order, time, group_id),
        )

    def give_up_group(self, group_id: int, reason: str, time: float) -> None:
        """Never trained; its trajectories stay on record."""
        self._db.execute(
            "UPDATE groups SET state = 'given_up', reason = ?, finished_at = ? WHERE id = ?",
            (reason, time, group_id),
        )
        self._db.execute("UPDATE trajectories SET state = 'given_up' WHERE group_id = ?", (group_id,))

    def consume(self, group_ids: Iterable[int], step: int) -> None:
        rows = [(step, group_id) for group_id in group_ids]
        for table, key in (("groups", "id"), ("trajectories", "group_id")):
            text = f"UPDATE {table} SET state = 'consumed', consumed_step = ? WHERE {key} = ?"
            self._db.executemany(text, rows)

    def take_back(self, samples: Iterable[Sample], groups: Iterable[int]) -> list[Sample]:
        """Groups that were to be trained are finished again, but for those of `samples`, whose responses are
        lost. Those of them that were in these groups under this attempt."""
        marks = {
            (i, attempt): group
            for group in groups
            for i, attempt in self._db.execute(
                "SELECT id, attempt FROM trajectories WHERE group_id = ? AND state = 'consumed'", (group,)
            )
        }
        lost = [sample for sample in samples if (sample.trajectory_id, sample.attempt) in marks]
        if lost:
            self._wait_again(groups)
        for sample in lost:
            self.lose_response(sample.trajectory_id)
            self._db.execute(
                "UPDATE groups SET state = 'granted', finish_order = NULL, finished_at = NULL WHERE id = ?",
                (marks[sample.trajectory_id, sample.attempt],),
            )
        return lost

    def _wait_again(self, groups: Iterable[int]) -> None:
        for table, key in (("groups", "id"), ("trajectories", "group_id")):
            text = f"UPDATE {table} SET state = 'finished', consumed_step = NULL WHERE {key} = ?"
            self._db.executemany(text, [(group,) for group in groups])

    def note_mismatches(self, mismatches: dict[int, tuple[float, int]]) -> None:
        """See messages.StepDone; a step trained again after a restore replaces what the first time gave."""
        self._db.executemany(
            "INSERT OR REPLACE INTO mismatches VALUES (?, ?, ?)", [(i, *m) for i, m in mismatches.items()]
        )

    def note_left_out(self, trained: Iterable[int], left_out: dict[int, str]) -> None:
        """Of the trajectories that a step has `trained` those that the divergence guard has left out, and
        why; in place of what a step before a restore gave."""
        self._db.executemany("DELETE FROM left_out WHERE trajectory_id = ?", [(i,) for i in trained])
        self._db.executemany("INSERT OR REPLACE INTO left_out VALUES (?, ?)", list(left_out.items()))

    def batch(self, group_ids: Iterable[int]) -> list[BatchGroup]:
        """The scored trajectories of these groups, in sample order."""
        return stored_groups(self._db, group_ids)

    def prompt_index(self, group_id: int) -> int:
        """Of a group that is there, the place of its prompt in the order of the prompts' file."""
        sql = "SELECT prompt_index FROM groups WHERE id = ?"
        return int(self._db.execute(sql, (group_id,)).fetchone()[0])

    # ---- archive -------------------------------------------------------------------------------------------

    def forget_responses(self, trajectories: Iterable[int], groups: Iterable[int]) -> None:
        """Places and prompts; what the run needs to know of the trajectories stays."""
        for table, key, ids in (
            ("responses", "trajectory_id", trajectories),
            ("prompts", "group_id", groups),
        ):
            self._db.executemany(f"DELETE FROM {table} WHERE {key} = ?", [(i,) for i in ids])

    def put_back(self, trajectory_id: int, place: ResponsePlace) -> None:
        """The trajectory's response is in a payload file again."""
        row = (trajectory_id, place.file, place.offset, place.size)
        self._db.execute("INSERT OR REPLACE INTO responses VALUES(?, ?, ?, ?)", row)

    # ---- restore and replay --------------------------------------------------------------------------------

    def restore(self, step: int) -> list[int]:
        """Back to the weights of step `step`: what later steps trained on is finished again. The ids of those
        groups.

        A step's number is that of the version before it.
        """
        later = "SELECT id FROM groups WHERE state = 'consumed' AND consumed_step >= ? ORDER BY id"
        groups = [group for (group,) in self._db.execute(later, (step,))]
        self._wait_again(groups)
        return groups

    def live_groups(self, ids: Iterable[int] | None = None) -> list[tuple[int, int, str, int, int, int]]:
        """(id, prompt_index, state, weight_step, number, finish_order) of all granted and finished groups, or
        of those among `ids`."""
        text = (
            "SELECT id, prompt_index, state, weight_step, number, COALESCE(finish_order, 0) "
            "FROM groups WHERE state IN ('granted', 'finished')"
        )
        if ids is None:
            return self._db.execute(f"{text} ORDER BY id").fetchall()
        return [row for i in ids for row in self._db.execute(f"{text} AND id = ?", (i,))]

    def samples_of(self, group_id: int) -> list[tuple[int, int, str, int, int, float, float, int]]:
        """(id, attempt, state, weight_id, weight_step, reward, accuracy, response_length) of a group's
        trajectories; zeros where not finished."""
        return self._db.execute(
            "SELECT id, attempt, state, weight_id, weight_step, COALESCE(reward, 0), COALESCE(accuracy, 0), "
            "COALESCE(response_length, 0) "
            "FROM trajectories WHERE group_id = ? ORDER BY sample_index",
            (group_id,),
        ).fetchall()

    def owners(self) -> list[tuple[int, int, int]]:
        """(id, replica, weight_step) of trajectories that were granted to a replica and have no score yet."""
        return self._db.execute(
            "SELECT id, replica, weight_step FROM trajectories "
            "WHERE state IN ('granted', 'generated') AND replica IS NOT NULL "
            "AND group_id IN (SELECT id FROM groups WHERE state = 'granted') ORDER BY id"
        ).fetchall()

    def lengths_of_groups(self) -> Iterator[tuple[int, list[int]]]:
        """(prompt_index, response tokens of each sample) of the groups that are complete, in the order of
        their grants; without those of which sums alone are left."""
        rows = self._db.execute(
            "SELECT group_id, prompt_index, response_length FROM groups "
            "JOIN trajectories ON group_id = groups.id WHERE groups.state != 'granted' "
            "AND response_length IS NOT NULL ORDER BY group_id"
        )
        for _, samples in groupby(rows, key=itemgetter(0)):
            found = list(samples)
            yield found[0][1], [length for *_, length in found]

    def counted_groups(self) -> int:
        """Groups granted and not given up."""
        return self._db.execute("SELECT COUNT(*) FROM groups WHERE state != 'given_up'").fetchone()[0]

    def accuracy_by_weight_id(self, step: int) -> list[tuple[int, int, float]]:
        """(weight id, trajectories, mean accuracy) of what step `step` trained on."""
        return self._db.execute(
            "SELECT weight_id, COUNT(*), AVG(accuracy) FROM trajectories WHERE group_id IN "
            "(SELECT id FROM groups WHERE state = 'consumed' AND consumed_step = ?) "
            "GROUP BY weight_id ORDER BY weight_id",
            (step,),
        ).fetchall()

    def consumed_groups(self, step: int) -> list[int]:
        """Groups that step `step` trained on, in the order of the batch: by id."""
        sql = "SELECT id FROM groups WHERE state = 'consumed' AND consumed_step = ? ORDER BY id"
        return [group for (group,) in self._db.execute(sql, (step,))]


# ---- scored trajectories: all but their columns, which are in payload files --------------------------------


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
