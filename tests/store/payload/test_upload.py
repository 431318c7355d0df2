"""Responses over the bulk door: what a rollout is told to be stored is in the run's payload files, each byte
written once, over any cut of the line."""

import errno
import os
import time
from concurrent.futures import Future
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.links.bulk_stand import BulkStand
from helpers.made import Made
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.bulk import AppendBytes, AskStored
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.store.payload import receiver, upload, writer
from laminar_hpc.store.payload.layout import pack
from laminar_hpc.store.payload.reader import read
from laminar_hpc.store.payload.receiver import PayloadReceiver
from laminar_hpc.store.payload.upload_state import UploadPiece, UploadState
from laminar_hpc.store.payload.writer import FOLDER


def made(i: int, n: int = 1000) -> Made:
    return Made(i, i // 4, [1, 2], [(i + k) % 1000 for k in range(n)], [-k / 256 for k in range(n)])


class Stand(BulkStand):
    def put(self, numbers: range, n: int = 1000) -> "list[tuple[int, Future[ResponsePlace]]]":
        return [(i, self.uploader.append(pack(made(i, n).response), b"behind")) for i in numbers]


@pytest.fixture
def stand(tmp_path):
    made_one = Stand(tmp_path)
    yield made_one
    made_one.close()


@pytest.fixture
def written(monkeypatch) -> list[int]:
    """How many bytes each write into the run's payload files has written."""
    counts, pwrite = list[int](), os.pwrite

    def counting(file: int, data: memoryview, offset: int) -> int:
        counts.append(pwrite(file, data, offset))
        return counts[-1]

    monkeypatch.setattr(receiver.os, "pwrite", counting)
    return counts


def stored(futures: "list[tuple[int, Future[ResponsePlace]]]") -> list[tuple[int, ResponsePlace]]:
    return [(i, future.result(60.0)) for i, future in futures]


def test_each_byte_is_written_once_over_cuts_within_frames(stand, written, monkeypatch):
    """The line is reset again and again, frames half way; files end and begin meanwhile. What was told to be
    stored is read as it was generated, nothing was written twice, and nothing stays at the rollout."""
    monkeypatch.setattr(writer, "_FILE_BYTES", 3 << 20)
    monkeypatch.setattr(upload, "_ASK_SECONDS", 0.2)
    stand.proxy.cuts = [700_000 * k for k in range(1, 9)]
    places = stored(stand.put(range(60), 20_000))
    assert not stand.proxy.cuts and len({place.file for _, place in places}) > 1
    for (i, _), found in zip(places, read(stand.run_dir, places, 0.0), strict=True):
        assert found.tokens.tolist() == made(i, 20_000).response_tokens
    sizes = [path.stat().st_size for path in (stand.run_dir / FOLDER).iterdir()]
    assert sum(written) == sum(sizes) == sum(place.size + len(b"behind") for _, place in places)
    assert len(list((stand.here / "away" / FOLDER).iterdir())) == 1, "the present file, and no earlier one"


def test_a_file_that_begins_when_all_is_stored(stand, monkeypatch):
    """Nothing waits when one file ends and the next begins: the next one's own bytes go out, and the one
    before is removed."""
    monkeypatch.setattr(writer, "_FILE_BYTES", 1000)
    places = [place for i in range(6) for place in stored(stand.put(range(i, i + 1)))]
    assert len({place.file for _, place in places}) == 6
    for (i, _), found in zip(places, read(stand.run_dir, places, 0.0), strict=True):
        assert found.tokens.tolist() == made(i).response_tokens
    assert len(list((stand.here / "away" / FOLDER).iterdir())) == 1


def test_a_place_is_told_when_its_bytes_are_on_the_disk(stand, monkeypatch):
    """No sooner: a sync of the run's file has covered them."""
    synced, fdatasync = dict[int, int](), os.fdatasync

    def sync(file: int) -> None:
        fdatasync(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    monkeypatch.setattr(receiver.os, "fdatasync", sync)
    late = list[ResponsePlace]()

    def told(done: "Future[ResponsePlace]") -> None:
        place = done.result()
        inode = (stand.run_dir / FOLDER / place.file).stat().st_ino
        if synced.get(inode, 0) < place.offset + place.size:
            late.append(place)

    futures = stand.put(range(50))
    for _, future in futures:
        future.add_done_callback(told)
    assert len(stored(futures)) == 50 and not late


def test_it_goes_on_at_the_next_controller(stand, written):
    """The door is closed, as with a controller that is killed, and opened again by the next one: by the same
    key, at the same address; no byte again."""
    stored(stand.put(range(3)))
    port = stand.door.key.port
    stand.door.close(is_over=False)
    futures = stand.put(range(3, 6))
    stand.open()
    assert stand.door.key.port == port
    places = stored(futures)
    assert [found.trajectory_id for found in read(stand.run_dir, places, 0.0)] == [3, 4, 5]
    assert sum(written) == (stand.run_dir / FOLDER / places[0][1].file).stat().st_size


def test_what_waits_is_bounded_while_the_line_stands_still(stand):
    """Packets are dropped: a window is in the sender's socket, the rest lies on its disk; then all goes."""
    stand.proxy.stalled = True
    futures = stand.put(range(40), 50_000)
    time.sleep(0.5)
    state = stand.uploader._state
    assert not futures[0][1].done() and state.sent - state.stored <= 8 << 20
    stand.proxy.stalled = False
    assert len(stored(futures)) == 40


def test_a_full_disk_of_the_run_is_waited_for(stand, monkeypatch):
    """What was cut off comes again when there is room."""
    stored(stand.put(range(1)))
    pwrite, tries = os.pwrite, list[int]()

    def full(file: int, data: memoryview, offset: int) -> int:
        tries.append(offset)
        if len(tries) % 2:
            return pwrite(file, data[:100], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upload, "_TROUBLE_SECONDS", 0.05)
    monkeypatch.setattr(receiver.os, "pwrite", full)
    futures = stand.put(range(1, 4))
    while len(tries) < 4:
        time.sleep(0.01)
    assert not futures[0][1].done()
    monkeypatch.setattr(receiver.os, "pwrite", pwrite)
    places = stored(futures)
    assert [found.trajectory_id for found in read(stand.run_dir, places, 0.0)] == [1, 2, 3]


def test_a_line_that_stays_cut_is_one_error(tmp_path):
    """After the patience, with the address; later responses hear it at once. The role ends of it."""
    stand = Stand(tmp_path, patience=0.5)
    stand.proxy.stalled = True
    with pytest.raises(LaminarError, match=rf"has reached 127.0.0.1:{stand.proxy.port} for 0 s"):
        stand.put(range(1))[0][1].result(20.0)
    with pytest.raises(LaminarError, match="has reached"):
        stand.put(range(1))[0][1].result(5.0)
    stand.close()


def test_others_responses_are_read_over_the_line(stand):
    """As a replica needs them that scores for one which has died; what is not there is one line."""
    places = stored(stand.put(range(3), 200_000))
    found = stand.uploader.read(places)
    assert [response.trajectory_id for response in found] == [0, 1, 2]
    assert found[2].tokens.tolist() == made(2, 200_000).response_tokens
    wrong = ResponsePlace(places[0][1].file, places[1][1].offset, places[1][1].size)
    with pytest.raises(LaminarError, match=r"trajectory 0 is not in .* \(there is trajectory 1\)"):
        stand.uploader.read([(0, wrong)])
    with pytest.raises(LaminarError, match="as it was generated"):
        stand.uploader.read([(0, ResponsePlace(places[0][1].file, 4, 1000))])
    with pytest.raises(LaminarError, match="cannot be read"):
        stand.uploader.read([(0, ResponsePlace("rollout9_00000000.0000", 0, 1000))])


@pytest.mark.parametrize(
    "name", ["../store.sqlite", "rollout3", "/etc/passwd", "rollout3_0123abcd.0000/x", ""]
)
def test_only_payload_files_are_written(tmp_path, name):
    """Whoever has the key writes nothing else in the run directory."""
    taken = PayloadReceiver(tmp_path)
    with pytest.raises(LaminarError, match="no payload file"):
        taken.append("a", AppendBytes(name, 0), b"bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_its_writers_alone(tmp_path):
    """Another process with the key cannot put bytes behind those of the first; nor is a link followed."""
    taken, name = PayloadReceiver(tmp_path), "rollout3_0123abcd.0000"
    taken.append("a", AppendBytes(name, 0), b"mine")
    with pytest.raises(LaminarError, match="another process's"):
        taken.append("b", AppendBytes(name, 4), b"not")
    taken.append("a", AppendBytes(name, 6), b"later")
    ((whose, told),) = taken.settle()
    assert (whose, told.size, told.missing) == ("a", 4, True)
    (tmp_path / FOLDER / "rollout4_0123abcd.0000").symlink_to(tmp_path / "elsewhere")
    taken.append("c", AppendBytes("rollout4_0123abcd.0000", 0), b"bytes")
    assert taken.settle()[0][1].trouble and not (tmp_path / "elsewhere").exists()
    taken.close()


def test_bytes_that_were_stored_and_are_gone_are_one_error(tmp_path):
    """A payload file that somebody has removed: no hole is filled with what comes later."""
    state, future = UploadState(), Future[ResponsePlace]()
    state.add(UploadPiece(ResponsePlace("rollout3_0123abcd.0000", 0, 100), 100, future))
    state.advance(state.next())
    state.told("rollout3_0123abcd.0000", 40)
    with pytest.raises(LaminarError, match="had 40: it was cut or removed"):
        state.told("rollout3_0123abcd.0000", 0, all_arrived=True)
    taken = PayloadReceiver(tmp_path)
    taken.append("a", AppendBytes("rollout3_0123abcd.0000", 40), b"later")
    taken.ask("a", AskStored("rollout3_0123abcd.0000", 1))
    assert [(told.size, told.missing) for _, told in taken.settle()] == [(0, True)]
    taken.close()


@settings(max_examples=60)
@given(st.integers(0, 1 << 30))
def test_any_course_of_sends_and_losses_ends_with_all_stored(seed):
    """Chunks are lost, answers are lost, late answers come: bytes are stored in order, each once, places are
    told in order, and no more than a window is on the way."""
    state, pieces, told = UploadState(), list[UploadPiece](), list[UploadPiece]()
    there, random = dict[str, int](), Random(seed)
    for number in range(random.randint(1, 4)):
        at = 0
        for size in random.choices([1, 5_000, 300_000, 9 << 20], k=random.randint(1, 4)):
            place = ResponsePlace(f"rollout3_0123abcd.{number:04d}", at, size)
            pieces.append(UploadPiece(place, at + size + 3, Future()))
            at += size + 3
    left = list(pieces)
    while left or state.waits:
        if left and random.random() < 0.5:
            state.add(left.pop(0))
        lost = random.random() < 0.2
        while (chunk := state.next()) is not None:
            assert chunk.offset + chunk.size - state.stored <= 8 << 20
            state.advance(chunk)
            lost |= random.random() < 0.1
            if not lost and there.get(chunk.file, 0) >= chunk.offset:
                there[chunk.file] = max(there.get(chunk.file, 0), chunk.offset + chunk.size)
        if random.random() < 0.5:
            told += state.told(
                state.file, random.randint(state.stored, max(state.stored, there.get(state.file, 0)))
            )
        else:
            told += state.told(state.file, there.get(state.file, 0), all_arrived=True)
    assert told == pieces
    assert there == {piece.place.file: piece.end for piece in pieces}
