"""`laminar audit` and `laminar export` of a run that goes on meanwhile, also from a machine that has only the
journal of its store."""

from contextlib import closing

import pytest

from helpers.emulated.archive_run import EmulatedRun
from laminar_hpc.report.export import rows
from laminar_hpc.store import archiver
from laminar_hpc.store.archive import files
from laminar_hpc.store.audit import records as audited
from laminar_hpc.store.audit.origins import responses_are_intact
from laminar_hpc.store.payload import writer
from laminar_hpc.store.store_copy import readable_store
from laminar_hpc.store.store_layout import connect_read_only


@pytest.fixture
def run(tmp_path, monkeypatch):
    """With its store in `local`, of which another machine sees the journal; payload files are small."""
    monkeypatch.setattr(writer, "_FILE_BYTES", 2000)
    monkeypatch.setattr(archiver, "_PART_BYTES", 1000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "config.yaml").write_text(f"store_dir: {tmp_path / 'not-here'}\n")
    run = EmulatedRun(tmp_path / "run", store_dir=tmp_path / "local")
    run.train(5)
    yield run
    run.archiving.close()
    run.store.close()


def exported(parts) -> list[tuple[int | None, int]]:
    return [(step, whole.record.trajectory_id) for step, part in parts for whole in part]


def culprits(records: audited.Records) -> list[str]:
    assert records.store is not None, records.damage
    return [line for line in responses_are_intact(records, records.store) if line is not None]


def test_what_is_archived_during_an_audit_elsewhere_is_no_culprit(run):
    """docs/promises.md#audited: responses that leave the payload files while a copy of the store is
    audited are no culprits; a payload file that is gone otherwise is."""
    before = set(run.payload_files())
    with audited.read(run.run_dir) as records:
        run.train(6)
        assert before - set(run.payload_files())
        assert culprits(records) == []
    with audited.read(run.run_dir) as records:
        run.payload_files()[-1].unlink()
        assert culprits(records)


def test_what_is_archived_during_an_export_elsewhere_is_in_it(run):
    """Promise (docs/data.md#trained-responses-the-archive-and-laminar-export): also of a live run, by a copy
    of its store."""
    store = readable_store(run.run_dir, "not-here")
    with closing(connect_read_only(store.path)) as db:
        before = exported(rows.parts(db, run.run_dir, 1, None))
        run.train(8)
        assert files.path_of(run.run_dir, 5).exists()
        assert exported(rows.parts(db, run.run_dir, 1, None)) == before


def goes_on(run: EmulatedRun) -> None:
    """A step trains what waits."""
    waiting = run.store._db.execute("SELECT id FROM groups WHERE state = 'finished'").fetchall()
    assert waiting
    run.store.rows.consume([group for (group,) in waiting], 4)


def goes_back(run: EmulatedRun) -> None:
    """What step 4 has trained waits again."""
    run.store.rows.restore(3)


@pytest.mark.parametrize("change", [goes_on, goes_back])
def test_what_changes_its_state_during_an_export_is_in_it_once(run, change):
    """The same promise, where the store is: what waits when the export begins is not left out because a step
    takes it, and what the run goes back for is not there twice."""
    run.store.rows.restore(4)
    run.store.commit()
    with closing(connect_read_only(run.store.path)) as db:
        whole, begun = exported(rows.parts(db, run.run_dir, 1, None)), []
        assert {step for step, _ in whole} == {1, 2, 3, 4, None}
        parts = rows.parts(db, run.run_dir, 1, None)
        while (4, 15) not in begun:
            begun += exported([next(parts)])
        change(run)
        run.store.commit()
        assert begun + exported(parts) == whole
