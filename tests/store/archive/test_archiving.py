"""When responses leave the payload files, and when they come back."""

import errno
import os
import shutil

import pytest

from helpers.emulated.archive_run import GROUPS, KEEP, SAMPLES, EmulatedRun
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line import unsaid
from laminar_hpc.store import archiver, archiving, old_steps, put_back
from laminar_hpc.store.archive import files, table
from laminar_hpc.store.gone_writers import GoneWriters
from laminar_hpc.store.payload import writer
from laminar_hpc.store.payload.whole import wholes

BATCH = GROUPS * SAMPLES
ROWS = 10 * BATCH  # of the store, where it lets go of more


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """A payload file holds some steps."""
    monkeypatch.setattr(writer, "_FILE_BYTES", 8 * BATCH * 500)
    monkeypatch.setattr(archiver, "_PART_BYTES", 1000)


def test_a_step_is_archived_when_all_checkpoints_are_later(tmp_path):
    """Promise: what a restore to a kept checkpoint would train again stays in the payload files, the rest is
    in the archive, as it was generated, and the store knows how much there was of it."""
    run = EmulatedRun(tmp_path)
    run.train(9)  # checkpoints of steps 6 and 8 are kept
    assert files.steps(tmp_path) == [1, 2, 3, 4, 5, 6] and run.store.archived_steps == 6 and not run.said
    for step in range(6):
        back = list(table.read(files.path_of(tmp_path, step + 1)))
        assert [b.record.digest for b in back] == [run.made(step, n).record().digest for n in range(BATCH)]
        assert [b.prompt.tolist() for b in back] == [run.made(step, n).prompt_tokens for n in range(BATCH)]
        assert run.store.rows.batch(run.store.rows.consumed_groups(step)) == []
    for step in (6, 7, 8):
        kept = wholes(tmp_path, run.store.rows.batch(run.store.rows.consumed_groups(step)))
        assert [k.record.trajectory_id for k in kept] == [step * BATCH + n for n in range(BATCH)]
    lengths = run.store._db.execute("SELECT SUM(response_length), SUM(reward) FROM trajectories").fetchone()
    assert lengths == (9 * BATCH * run.tokens, 9 * BATCH)
    run.archiving.close()
    run.store.close()


def test_a_new_store_that_lies_apart_is_archived_too(tmp_path):
    """Promise: with `store_dir` responses leave the payload files of the run as well, in its first job as in
    any other."""
    (tmp_path / "run").mkdir()
    run = EmulatedRun(tmp_path / "run", store_dir=tmp_path / "local")
    run.train(9)
    assert files.steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6] and not run.said
    run.archiving.close()
    run.store.close()


def bounded(tmp_path, monkeypatch, steps: int) -> None:
    """Disk and store of two halves of a run."""
    monkeypatch.setattr(old_steps, "ROWS_MAX", ROWS)
    run, sizes = EmulatedRun(tmp_path, "last:5"), []
    for _ in range(2):
        run.train(steps // 2)
        run.store._db.execute("COMMIT")
        run.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes.append((tmp_path / "store.sqlite").stat().st_size)
        run.store._db.execute("BEGIN IMMEDIATE")
        payload = sum(path.stat().st_size for path in run.payload_files())
        step_bytes = BATCH * (8 * run.tokens + 100)
        assert payload <= (KEEP + 1) * run.every * step_bytes + 2 * writer._FILE_BYTES
        assert len(files.steps(tmp_path)) == 5
        assert run.store.old_steps.rows() <= ROWS + BATCH
        rows = run.store._db.execute("SELECT COUNT(*) FROM trajectories").fetchone()[0]
        assert rows == run.store.old_steps.rows()
    per_step = (sizes[1] - sizes[0]) / (steps / 2)
    assert per_step < GROUPS * 150 + 150, f"{per_step} bytes per step for ever"
    run.archiving.close()
    run.store.close()


def test_disk_and_store_are_bounded(tmp_path, monkeypatch):
    """Promise: payload files and archive do not grow with the steps, nor does the store with the
    trajectories: only by the rows of groups, and one of each step."""
    bounded(tmp_path, monkeypatch, 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_disk_and_store_are_bounded_over_ten_thousand_steps(tmp_path, monkeypatch):
    """The same over 10,000 steps."""
    bounded(tmp_path, monkeypatch, 10_000)


def test_a_restore_behind_the_archive_brings_responses_back(tmp_path):
    """Promise: a restore to a checkpoint that is older than what was archived, as a user does who deletes the
    newer ones, trains the same responses again; then they are archived again."""
    run = EmulatedRun(tmp_path)
    run.train(9)
    shutil.rmtree(tmp_path / "checkpoints")
    run, signs = run.again(), list[bool]()
    run.archiving.at_work = lambda: signs.append(True)
    run.restore(3)
    assert run.store.archived_steps == 3 and len(signs) == 3 * BATCH, "a long turn shows that it goes on"
    groups = [row[0] for row in run.store.rows.live_groups()]
    assert groups == list(range(3 * GROUPS, 9 * GROUPS))
    back = wholes(tmp_path, run.store.rows.batch(groups))
    assert [b.record.digest for b in back] == [
        run.made(step, n).record().digest for step in range(3, 9) for n in range(BATCH)
    ]
    assert [b.prompt.tolist() for b in back[:2]] == [run.made(3, n).prompt_tokens for n in range(2)]
    run.store.rows.consume(groups[:GROUPS], 3)
    run.state.trainer_step = 4
    run.checkpoint(4), run.checkpoint(5)
    run.settle()
    assert run.store.archived_steps == 4 and not run.said
    run.store.close()


def test_a_restore_behind_old_steps_brings_their_rows_back(tmp_path, monkeypatch):
    """Promise: also of steps of which the store has sums alone it trains the same again: rows, scores and
    prompts are those that they were."""
    run = EmulatedRun(tmp_path)
    run.train(3)
    groups = run.store.rows.consumed_groups(1) + run.store.rows.consumed_groups(2)
    before = [run.store.rows.samples_of(group) for group in groups]
    batch = run.store.rows.batch(groups)
    monkeypatch.setattr(old_steps, "ROWS_MAX", 0)
    run.train(6)
    while run.store.old_steps.trim(run.store.archived_steps):
        pass
    kept = run.store._db.execute("SELECT MIN(consumed_step), COUNT(*) FROM trajectories").fetchone()
    assert kept == (6, 3 * BATCH) and run.store.next_ids() == (0, 9 * GROUPS, 9 * BATCH)
    monkeypatch.setattr(old_steps, "ROWS_MAX", ROWS)
    shutil.rmtree(tmp_path / "checkpoints")
    run = run.again()
    run.restore(1)
    assert [run.store.rows.samples_of(group) for group in groups] == [
        [(*row[:2], "finished", *row[3:]) for row in rows] for rows in before
    ]
    back = run.store.rows.batch(groups)
    for group in (*back, *batch):
        for record in group.trajectories:
            record.place = None
    assert back == batch and run.store.old_steps.sums(1) == (0, 0, 0, 0, 0)
    assert run.store.old_steps.sums(0)[0] == BATCH
    run.store.close()


def test_ids_are_not_used_again(tmp_path, monkeypatch):
    """Promise: a trajectory id belongs to one trajectory for ever, also when no row is left that knows it."""
    monkeypatch.setattr(old_steps, "ROWS_MAX", 0)
    run = EmulatedRun(tmp_path)
    run.train(2)
    run.checkpoint(3)
    run.archiving._limit = 2
    run.settle()
    while run.store.old_steps.trim(2):
        pass
    assert run.store._db.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)
    run = run.again()
    assert run.store.next_ids()[2] == 2 * BATCH and run.store.old_steps.rows() == 0
    run.store.close()


def test_a_restore_to_a_step_that_is_being_archived_keeps_its_responses(tmp_path):
    """Promise: what the trainers go back to train is not let go, though the thread has archived it just
    now."""
    run = EmulatedRun(tmp_path)
    run.train(3)
    run.checkpoint(4)  # and 2: the first two steps may go
    run.archiving.tick(run.state.trainer_step)
    run.archiving._job.result(30)
    run.restore(0)
    run.archiving.tick(run.state.trainer_step)
    run.store.commit()
    groups = list(range(3 * GROUPS))
    assert run.store.archived_steps == 0 and [g.group_id for g in run.store.rows.batch(groups)] == groups
    assert len(wholes(tmp_path, run.store.rows.batch(groups))) == 3 * BATCH
    run.store.close()


def test_a_restore_that_finds_no_room_says_so(tmp_path, monkeypatch):
    """Promise: a disk that does not take the responses is not called an archive that cannot be read."""
    run = EmulatedRun(tmp_path)
    run.train(9)

    def full(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LaminarError, match=r"step_000004.parquet has .* cannot be written .*Input"):
        run.restore(3)
    monkeypatch.undo()
    run.store.roll_back()
    run.again().store.close()


def test_a_restore_to_what_is_not_kept_is_one_line(tmp_path):
    """Promise: the run does not go on with groups that have lost their responses."""
    run = EmulatedRun(tmp_path, "last:2")
    run.train(9)
    with pytest.raises(
        LaminarError, match=r"go back to step 3, and what step 4 trained .*archive=last:2"
    ) as caught:
        run.restore(3)
    assert "\n" not in str(caught.value) and run.store.archived_steps == 6
    run.store.roll_back()
    run.again().store.close()


def test_a_restore_behind_the_archive_is_one_line_where_routes_are_replayed(tmp_path):
    """Promise: routes are not archived, so what was trained under them is not trained again without."""
    run = EmulatedRun(tmp_path)
    run.train(9)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_hidden_layers": 2}')
    config = run.archiving._config
    config.model.path = str(tmp_path)
    config.algorithm.routing_replay = "true"
    with pytest.raises(
        LaminarError, match=r"no routes of what step 4 trained.*routing_replay=false"
    ) as caught:
        run.restore(3)
    assert "\n" not in str(caught.value) and run.store.archived_steps == 6
    run.store.roll_back()
    run.again().store.close()


def test_a_controller_dies_before_the_store_knows(tmp_path):
    """Promise: a file that was written and never noted is written again; nothing is lost in between."""
    run = EmulatedRun(tmp_path)
    run.train(3)
    run.checkpoint(4)  # and 2: the first two steps may go
    run.archiving.tick(run.state.trainer_step)
    run.archiving._job.result(30)
    before = files.path_of(tmp_path, 1).read_bytes()
    run = run.again()
    assert (
        run.store.archived_steps == 0
        and len(run.store.rows.batch(run.store.rows.consumed_groups(0))) == GROUPS
    )
    run.settle()
    assert run.store.archived_steps == 2 and files.path_of(tmp_path, 1).read_bytes() == before
    run.store.close()


def test_a_step_that_cannot_be_read_stays(tmp_path, monkeypatch):
    """Promise: a payload file that is damaged is said in one line, nothing of the step is let go, and it is
    tried again."""
    monkeypatch.setattr(archiving, "_AGAIN_SECONDS", 0.0)
    run = EmulatedRun(tmp_path)
    run.train(3)
    damaged = run.payload_files()[0]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    run.checkpoint(4)
    run.settle()
    assert len(run.said) == 1 and "step 1 could not be archived" in run.said[0] and "\n" not in run.said[0]
    assert run.store.archived_steps == 0 and files.steps(tmp_path) == []
    assert len(run.store.rows.batch(run.store.rows.consumed_groups(0))) == GROUPS
    damaged.write_bytes(content)
    run.settle()
    assert run.store.archived_steps == 2 and len(run.said) == 1
    run.store.close()


def test_a_file_that_a_rollout_may_still_speak_of_stays(tmp_path):
    """Promise: a payload file without a place in the store is removed only when the store knows a later one
    of the same writer: word of what is in it may be on its way."""
    run = EmulatedRun(tmp_path)
    run.train(1)
    [first] = run.payload_files()
    stem = first.name.rpartition(".")[0]
    folder = first.parent
    for name in (f"{stem}.0001", "rollout1_00000000.0000", "rollout1_00000000.0001", "notes.txt"):
        (folder / name).write_bytes(b"x")
    first.rename(folder / f"{stem}.0002")
    run.store._db.execute("UPDATE responses SET file = ?", (f"{stem}.0002",))
    assert archiver.remove_empty(run.store._db, folder, lambda _: False) == 1
    assert {p.name for p in folder.iterdir()} == {
        f"{stem}.0002",
        "rollout1_00000000.0000",
        "rollout1_00000000.0001",
        "notes.txt",
    }
    run.store.close()


def test_the_last_files_of_a_writer_that_is_gone_are_removed(tmp_path):
    """Promise: of earlier launches no payload file stays when all that is in it is archived, nor does one
    that holds nothing; what has a place in the store stays."""
    run = EmulatedRun(tmp_path)
    run.train(5)
    (tmp_path / writer.FOLDER / "rollout7_00000000.0003").write_bytes(b"of a death before the first place")
    before = run.payload_files()
    run = run.again()
    assert len(before) == 2 and run.payload_files() == before
    run.train(6)
    now, used = run.payload_files(), run.store._db.execute("SELECT DISTINCT file FROM responses").fetchall()
    assert not set(now) & set(before) and {path.name for path in now} >= {name for (name,) in used}
    run.store.close()


def test_who_writes_no_more(tmp_path):
    """Promise: with roles apart a rollout is gone when its last word is in the store, or it has been
    away for longer than it would wait; one that comes back in time is not."""
    folder = tmp_path / writer.FOLDER
    folder.mkdir()
    for name in ("archive0_0000000a.0000", "rollout1_0000000b.0000", "rollout2_0000000c.0001", "notes.txt"):
        (folder / name).write_bytes(b"")
    gone = GoneWriters(tmp_path, True, 60.0, now=0.0)
    gone.ended(5)
    known = gone.gone()
    assert known("archive0_0000000a") and not known("rollout5_0000000d")  # its turn is not committed
    gone.tick(1.0)
    gone.came(1)
    assert gone.gone()("rollout5_0000000d") and gone.is_gone(5) and not known("rollout5_0000000d")
    gone.tick(61.0)
    assert gone.is_gone(2) and not gone.is_gone(1) and not gone.gone()("rollout1_0000000b")
    unsaid.leave(tmp_path, unsaid.Head("rollout:-1:a", 2, "", 1), [b"what may name a file of its own"])
    assert gone.gone()("archive0_0000000a") and not gone.gone()("rollout2_0000000c")
    gone.away(1, 70.0)
    gone.tick(120.0)
    gone.came(1)
    gone.tick(200.0)
    assert not gone.is_gone(1) and not gone.gone()("notes")


def test_a_replay_trains_archived_steps(tmp_path):
    """Promise: a replay has each batch as it was, also of a step that is in the archive: from payload files
    of its own."""
    run, own = EmulatedRun(tmp_path / "run"), tmp_path / "replay"
    own.mkdir()
    run.train(5)
    assert run.store.archived_steps == 2
    payloads = writer.PayloadWriter(own, put_back.WRITER)
    groups = put_back.batch_of(payloads, files.path_of(tmp_path / "run", 2))
    assert [group.group_id for group in groups] == run.store.rows.consumed_groups(1)
    back = wholes(own, groups)
    assert [b.record.digest for b in back] == [run.made(1, n).record().digest for n in range(BATCH)]
    assert [b.prompt.tolist() for b in back] == [run.made(1, n).prompt_tokens for n in range(BATCH)]
    assert put_back.batch_of(payloads, files.path_of(tmp_path / "run", 3)) == []
    payloads.close()
    run.store.close()
