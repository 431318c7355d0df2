"""Payload files: what a writer has told a place of is on the disk and read as it was, by any number of
threads; what a death or a full disk has cut off is nobody's."""

import errno
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from helpers.made import Made
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.in_order import InOrder
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.store.payload import writer as writing
from laminar_hpc.store.payload.layout import pack
from laminar_hpc.store.payload.reader import is_sound, read
from laminar_hpc.store.payload.writer import FOLDER, PayloadWriter


def made(i: int) -> Made:
    n = 3 + i % 50
    return Made(i, i // 4, [1, 2], [(i + k) % 1000 for k in range(n)], [-k / 256 for k in range(n)])


def written(run_dir: Path, count: int) -> list[tuple[int, ResponsePlace]]:
    writer = PayloadWriter(run_dir, "rollout7")
    places = list[tuple[int, ResponsePlace]]()
    for first in range(0, count, 50):  # so many are written at once
        some = range(first, min(first + 50, count))
        futures = [writer.append(pack(made(i).response)) for i in some]
        places += [(i, future.result(10.0)) for i, future in zip(some, futures, strict=True)]
    writer.close()
    return places


def test_what_is_written_is_read_in_any_order(tmp_path, monkeypatch):
    """Over several files, as one ends when it is large enough; each response once, in the order asked for."""
    monkeypatch.setattr(writing, "_FILE_BYTES", 20_000)
    places = written(tmp_path, 300)
    assert len({place.file for _, place in places}) > 1 and all(is_sound(place) for _, place in places)
    asked = [places[i] for i in np.random.default_rng(0).permutation(300)]
    for (i, _), found in zip(asked, read(tmp_path, asked), strict=True):
        assert found.trajectory_id == i and found.tokens.tolist() == made(i).response_tokens
    assert read(tmp_path, []) == []


def test_a_crowd_of_responses_is_synced_once(tmp_path, monkeypatch):
    """What comes while the writer gathers goes out together: neither a sync nor a wake-up for each."""
    writer, crowd, syncs = PayloadWriter(tmp_path, "rollout0"), threading.Event(), list[int]()
    monkeypatch.setattr(writer._closing, "wait", lambda _: crowd.wait(60))
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    futures = [writer.append(pack(made(i).response)) for i in range(50)]
    crowd.set()
    assert len({future.result(60.0) for future in futures}) == 50 and len(syncs) == 1
    writer.close()


def test_it_is_on_the_disk_before_anybody_is_told(tmp_path, monkeypatch):
    """The future is done only after the sync of all of its record."""
    synced, fdatasync = [0], os.fdatasync

    def sync(file: int) -> None:
        fdatasync(file)
        synced[0] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fdatasync", sync)
    writer, late = PayloadWriter(tmp_path, "rollout0"), list[ResponsePlace]()

    def told(done: Future) -> None:
        if synced[0] < done.result().offset + done.result().size:
            late.append(done.result())

    futures = [writer.append(pack(made(i).response)) for i in range(200)]
    for future in futures:
        future.add_done_callback(told)
    assert futures[-1].result(10.0).offset > 0 and not late
    writer.close()


def test_a_write_that_fails_leaves_nothing_and_later_ones_are_whole(tmp_path, monkeypatch):
    """A disk without room: what was cut off is cut away, and its file goes on where it was."""
    [(_, first)] = places = written(tmp_path, 1)
    writer, write = PayloadWriter(tmp_path, "rollout1"), os.write
    places.append((1, writer.append(pack(made(1).response)).result(10.0)))

    def full(file: int, data: memoryview) -> int:
        write(file, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(pack(made(2).response)).result(10.0)
    monkeypatch.undo()
    places.append((3, writer.append(pack(made(3).response)).result(10.0)))
    writer.close()
    assert [found.trajectory_id for found in read(tmp_path, places)] == [0, 1, 3] and first.offset == 0
    file = tmp_path / FOLDER / places[-1][1].file
    assert file.stat().st_size == places[-1][1].offset + places[-1][1].size


def test_what_cannot_be_cut_away_is_written_over(tmp_path, monkeypatch):
    """A file system that refuses the cut as well: the next response is where its place says."""
    writer, write = PayloadWriter(tmp_path, "rollout1"), os.write

    def full(file: int, data: memoryview) -> int:
        write(file, data[:20])
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def refused(*_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "ftruncate", refused)
    with pytest.raises(OSError, match="quota"):
        writer.append(pack(made(0).response)).result(10.0)
    monkeypatch.undo()
    place = writer.append(pack(made(1).response)).result(10.0)
    writer.close()
    assert read(tmp_path, [(1, place)])[0].tokens.tolist() == made(1).response_tokens


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    """What was appended meanwhile is written, in order and once, as soon as there is room; other errors are
    told at once, and so is a full disk to a writer that is closed."""
    monkeypatch.setattr("laminar_hpc.store.payload.writer._LOOK_SECONDS", 0.01)
    writer, write, tries = PayloadWriter(tmp_path, "rollout1", patience=60.0), os.write, list[int]()
    reason = [errno.ENOSPC]

    def full(file: int, data: memoryview) -> int:
        tries.append(len(data))
        write(file, data[:20])
        raise OSError(reason[0], os.strerror(reason[0]))

    monkeypatch.setattr(os, "write", full)
    futures = [writer.append(pack(made(i).response)) for i in range(3)]
    while len(tries) < 5:
        time.sleep(0.01)
    assert not any(future.done() for future in futures)
    monkeypatch.setattr(os, "write", write)
    places = [(i, future.result(10.0)) for i, future in enumerate(futures)]
    assert [found.trajectory_id for found in read(tmp_path, places)] == [0, 1, 2]
    assert sum(place.size for _, place in places) == (tmp_path / FOLDER / places[0][1].file).stat().st_size

    monkeypatch.setattr(os, "write", full)
    reason[0] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        writer.append(pack(made(3).response)).result(10.0)
    reason[0] = errno.ENOSPC
    last = writer.append(pack(made(4).response))
    writer.close()
    with pytest.raises(OSError, match="No space left"):
        last.result(10.0)


@pytest.mark.parametrize("damage", ["torn", "changed", "another", "gone", "astray"])
def test_what_is_not_as_it_was_is_named_in_one_line(tmp_path, damage):
    """A torn tail, a changed byte, another response, a file that is not there, a name that leads away."""
    places = written(tmp_path, 3)
    i, place = places[2]
    path = tmp_path / FOLDER / place.file
    content = path.read_bytes()
    if damage == "torn":
        path.write_bytes(content[:-5])
    elif damage == "changed":
        path.write_bytes(content[:-5] + b"\xff" + content[-4:])
    elif damage == "another":
        place = places[0][1]
    elif damage == "gone":
        path.unlink()
    else:
        place = ResponsePlace("../store.sqlite", 0, 10)
    with pytest.raises(
        LaminarError, match=r"^the response of trajectory 2 is not in .*laminar audit RUN_DIR$"
    ):
        read(tmp_path, [(i, place)], late=0.0)


def test_a_file_that_another_machine_sees_late_is_waited_for(tmp_path):
    """A network file system may show what is on its disk after a moment."""
    places = written(tmp_path, 2)
    path = tmp_path / FOLDER / places[1][1].file
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    later = threading.Timer(0.15, path.write_bytes, [content])
    later.start()
    assert [found.trajectory_id for found in read(tmp_path, places)] == [0, 1]
    later.join()


def test_messages_keep_their_order_behind_a_write():
    """What is said after a response is heard after it, though it waits for nothing itself; after a write that
    fails nothing more goes out, and its error is told once."""
    went, errors = list[bytes](), list[Exception]()
    order, first, second = InOrder(went.append, errors.append), Future[int](), Future[int]()
    order.add(b"a")
    order.add_after(first, lambda n: b"first %d" % n)
    order.add(b"b")
    order.add_after(second, lambda n: b"second %d" % n)
    order.add(b"c")
    assert went == [b"a"] and not order.idle
    second.set_result(2)
    assert went == [b"a"]
    first.set_result(1)
    assert went == [b"a", b"first 1", b"b", b"second 2", b"c"] and order.idle
    third = Future[int]()
    order.add_after(third, lambda n: b"third")
    order.add(b"d")
    third.set_exception(OSError("no room"))
    order.drain(10.0)
    assert len(went) == 5 and [str(error) for error in errors] == ["no room"]
