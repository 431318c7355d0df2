"""A full disk is recognised through whatever a library makes of it, and nothing waits or breaks because of
it."""

import errno
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from helpers.stand_ins import STAND_IN, one_rank
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch import launch, launch_role, ranks
from laminar_hpc.line.agent_line import REFUSED, RankOrders
from laminar_hpc.machine.observability.metrics import MetricsWriter
from laminar_hpc.store.full_disk import NO_ROOM, full_disk_text, is_full_disk, put
from laminar_hpc.store.store import Store


def config_of(run_dir: Path) -> RunConfig:
    return RunConfig(run_dir=str(run_dir))


def test_a_device_without_room_is_named_with_the_cure(tmp_path):
    """Promise: the real error of a real device, also under another exception, becomes one line with disk and
    cure."""
    with pytest.raises(RuntimeError) as raised:
        try:
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"x")
        except OSError as error:
            raise RuntimeError("a library failed") from error
    text = full_disk_text(raised.value, config_of(tmp_path))
    assert text.startswith(f"no room on the disk of run_dir={tmp_path} (") and "\n" not in text
    assert text.endswith(
        "go on with the same command and resume=auto, which begins at step 0, as there is no checkpoint yet"
    )


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (RuntimeError("Parent directory ...: [Errno 28] No space left on device"), True),
        (ValueError("a file write failed, on a disk with room"), False),
        (OSError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_which_errors_are_of_a_full_disk(tmp_path, error, full):
    """Promise: a quota and a library's own words count; other errors keep their own text."""
    assert is_full_disk(error) == full and bool(full_disk_text(error, config_of(tmp_path))) == full


def test_what_a_job_leaves_is_made_as_soon_as_there_is_room(tmp_path, monkeypatch):
    """Promise: a Slurm job that ends on a full disk is requeued all the same; any other error is one."""
    errors, made = [errno.ENOSPC, errno.EDQUOT, 0, errno.EACCES], Path.touch

    def touch(file: Path) -> None:
        if number := errors.pop(0):
            raise OSError(number, os.strerror(number))
        made(file)

    monkeypatch.setattr(Path, "touch", touch)
    put(tmp_path / "again", sleep=lambda _: None)
    assert (tmp_path / "again").exists() and errors == [errno.EACCES]
    with pytest.raises(PermissionError):
        put(tmp_path / "again", sleep=lambda _: None)


def test_a_store_that_cannot_grow_keeps_what_it_committed(tmp_path):
    """Promise: SQLite's own error is recognised, closing does not hide it, and what was committed is
    whole."""
    store = Store(tmp_path)
    store.put("kept", 1)
    store.commit()
    store._db.execute("COMMIT")
    [(pages,)] = store._db.execute("PRAGMA page_count").fetchall()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    store._db.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError) as raised:
        for number in range(100_000):
            store.put(f"lost {number}", number)
    assert is_full_disk(raised.value)
    store.roll_back()
    store.close()
    assert Store(tmp_path).get("kept", 0) == 1


def test_the_launcher_ends_without_a_traceback(tmp_path, monkeypatch):
    """Promise: what ranks have printed, which is written last, finds no room, and nobody has to read about
    it."""
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "launch.log"
    log.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        log.write_text("x" * 100_000)
    monkeypatch.setattr(ranks, "_RANK", STAND_IN)
    life = ranks.Life(["import sys; sys.stderr.write('x' * 100_000)"], ranks.Ranks([0], 1), RankOrders(), "")
    while not life.look():
        time.sleep(0.02)
    life.close(log)


@pytest.mark.timeout(60)
def test_curves_do_not_block_the_controller(tmp_path):
    """Promise: when TensorBoard's writing thread has died, metrics are still written and nothing waits for
    it."""
    metrics = MetricsWriter(tmp_path)
    metrics.write("start", restored_step=-1)
    assert metrics._board is not None
    metrics._board.file_writer.event_writer._worker.stop()
    for step in range(20):
        metrics.write("step", step=step, loss=0.5, entropy=0.1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 21


class Full:
    """The file of a disk that is full."""

    def write(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.timeout(60)
def test_curves_that_can_no_longer_be_written_do_not_block_the_controller(tmp_path):
    """Promise: that thread may die while the points of one line come."""
    metrics = MetricsWriter(tmp_path)
    metrics.write("start", restored_step=-1)
    assert metrics._board is not None
    writer = metrics._board.file_writer.event_writer
    writer._ev_writer._py_recordio_writer._writer = Full()
    metrics.write("step", step=1, **{f"loss{number}": 0.5 for number in range(2000)})
    writer._worker.join(30)
    assert not writer._worker.is_alive()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.fixture
def lives(tmp_path, monkeypatch) -> list[object]:
    """Those of a controller that finds no room three times."""
    found: list[object] = []

    class Life:
        causes, is_refused = [f"{NO_ROOM} run_dir={tmp_path}: make room, or choose another"], False

        def __init__(self, words: list[str], **_: object) -> None:
            found.append(self)
            self.failed = (0, REFUSED) if len(found) < 4 else None

        def look(self) -> bool:
            return True

        def close(self, log: Path) -> None: ...

    monkeypatch.setattr(launch, "Life", Life)
    monkeypatch.setattr(launch, "ROOM_LOOK_SECONDS", 0.0)
    return found


@pytest.mark.parametrize(("room", "code", "started"), [(1 << 30, 0, 4), (4096, 2, 1)])
def test_a_controller_starts_again_whenever_there_is_room(tmp_path, monkeypatch, lives, room, code, started):
    """Promise (docs/promises.md#failure-domains): however often a disk fills up after the same step, a
    spare of Slurm's stays one; without room in time it ends."""
    monkeypatch.setattr("laminar_hpc.store.full_disk._room", lambda path: room)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test's own process keeps its handlers
    words = ["experiment=demo", f"run_dir={tmp_path}", "cluster.join_timeout_seconds=1"]
    assert launch_role.main(["controller", "1", *words]) == code
    assert len(lives) == started


def test_room_is_awaited_no_longer_than_the_user_lets_it(tmp_path, monkeypatch, lives):
    """Promise: a controller that waits for room ends as soon as it is told to."""
    monkeypatch.setattr("laminar_hpc.store.full_disk._room", lambda path: 4096)
    group = one_rank("controller", tmp_path, "", per_hour=10)
    for _ in range(5):
        group.look()
    assert group.code is None
    group.is_told = True
    group.look()
    assert group.code == REFUSED and len(lives) == 1
