"""The journal of a store: what was committed is known on another machine, and what does not belong together
is not mixed."""

import os
import random
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers.control.journal_writer import Writers
from helpers.control.journals import Place, groups, tables, transaction
from laminar_hpc.config.errors import Refused
from laminar_hpc.store import journal, journal_watch, rebuild
from laminar_hpc.store.full_disk import is_full_disk
from laminar_hpc.store.journal import take_snapshot
from laminar_hpc.store.journal_files import Position, claim_era, segment_name, segments, snapshots
from laminar_hpc.store.journal_watch import JournalWatch
from laminar_hpc.store.recovery import identity, journal_id, retire, settle
from laminar_hpc.store.store import Store
from laminar_hpc.store.store_copy import readable_store


def waited(condition, what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.005)


# ---- rebuilt elsewhere -------------------------------------------------------------------------------------


def test_another_machine_knows_everything_and_goes_on(tmp_path):
    """Promise: docs/promises.md#journal. A controller on a machine without the store rebuilds it, with
    one line; the first machine catches up when it is its turn again."""
    place = Place(tmp_path)
    place.write(0, 1, 2)
    assert place.lines == []
    assert tables(place.path("a")) == place.rebuilt()
    place.write(3, machine="b")
    [line] = place.lines
    assert f"{place.path('b')} was rebuilt from {place.folder}: transaction 3, 3 since the last" in line
    assert (
        identity(place.path("a")).store_id == identity(place.path("b")).store_id == journal_id(place.folder)
    )
    place.write(4, machine="a")
    assert len(place.lines) == 2 and "was behind its journal" in place.lines[1]
    held = tables(place.path("a"))
    assert groups(held) == [0, 1, 2, 3, 4] and held == place.rebuilt()


@pytest.fixture
def writers(tmp_path):
    writers = Writers(tmp_path)
    yield writers
    writers.close()


@pytest.mark.timeout(120)
def test_a_kill_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path, writers):
    """Promise: after kill -9 in the middle of transactions, segments and snapshots, the journal alone and the
    local store with it know the same: all that was acknowledged, and at most the one in flight."""
    place, seed = Place(tmp_path), random.Random(1)
    life, first, made = 0, 0, set()
    while life < 20 or first <= 100 or not made:
        life += 1
        assert life < 200, "hardly anything was written, or no snapshot taken"
        pid = writers.begin(first)
        time.sleep(seed.uniform(0, 0.04))  # the moment of its death
        os.kill(pid, signal.SIGKILL)
        acknowledged = max(first, writers.acknowledged())
        held = place.rebuilt()
        known = groups(held)
        assert known == list(range(len(known))) and len(known) - 1 in (acknowledged, acknowledged + 1)
        settle(place.folder, place.path(), place.lines.append)
        assert tables(place.path()) == held, f"life {life}"
        made |= {file.path.name for file in snapshots(place.folder)}
        first = len(known)


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.binary(max_size=40),
    st.booleans(),
)
KEYS = st.integers(0, 6)
STEPS = st.one_of(
    st.tuples(st.just("INSERT OR REPLACE INTO odd VALUES(?, ?, ?)"), st.tuples(KEYS, VALUES, VALUES)),
    st.tuples(st.just("UPDATE odd SET a = ?, b = a WHERE id >= ?"), st.tuples(VALUES, KEYS)),
    st.tuples(st.just(" delete from odd WHERE id = :id"), st.fixed_dictionaries({"id": KEYS})),
    st.tuples(st.just("INSERT INTO odd(a) SELECT b FROM odd WHERE id < ?"), st.tuples(KEYS)),
    st.tuples(st.just("many"), st.lists(st.tuples(KEYS, VALUES, VALUES), max_size=4)),
    st.tuples(st.sampled_from(["commit", "start again", "elsewhere", "snapshot"]), st.just(())),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=25))
def test_any_statements_rebuild_the_same_store(tmp_path_factory, steps):
    """Promise: whatever a part of the controller writes, by whatever statement and with new tables, is
    journalled without its doing anything."""
    place, machine = Place(tmp_path_factory.mktemp("any")), "a"
    store = place.start()
    store._db.execute("CREATE TABLE odd(id INTEGER PRIMARY KEY, a, b)")
    for sql, parameters in steps:
        if sql == "commit":
            store.commit()
        elif sql in ("start again", "elsewhere"):
            store.close()
            machine += "b" if sql == "elsewhere" else ""
            store = place.start(machine)
        elif sql == "snapshot":
            store.commit()
            take_snapshot(place.path(machine), place.folder, threading.Event(), 10**6)
        elif sql == "many":
            store._db.executemany("INSERT OR REPLACE INTO odd VALUES(?, ?, ?)", iter(parameters))
        else:
            store._db.cursor().execute(sql, parameters)
    store.close()
    assert tables(place.path(machine)) == place.rebuilt()


def test_a_store_can_be_rebuilt_by_hand(tmp_path, capsys):
    """Promise: `python -m laminar_hpc.store.rebuild RUN_DIR FILE` writes what the journal knows, and
    overwrites nothing."""
    place = Place(tmp_path)
    place.write(0, 1)
    rebuild.main(place.folder.parent, tmp_path / "copy.sqlite")
    assert tables(tmp_path / "copy.sqlite") == tables(place.path())
    assert f"{tmp_path}/copy.sqlite: transaction 2" in capsys.readouterr().out
    with pytest.raises(Refused, match="exists; name another file"):
        rebuild.main(place.folder.parent, place.path())
    with pytest.raises(Refused, match="holds no journal"):
        rebuild.main(tmp_path, tmp_path / "other.sqlite")


# ---- damage ------------------------------------------------------------------------------------------------


def test_a_torn_last_record_is_cut_off(tmp_path):
    """Promise: whatever part of its last transaction a death has left, the journal is the one before."""
    place = Place(tmp_path)
    place.write(0, 1)
    before, size = place.rebuilt(), place.last().stat().st_size
    store = place.start()  # a segment of its own with a header, then two records
    transaction(store, 2, 9)
    two, begins = place.rebuilt(), place.last().stat().st_size
    transaction(store, 3, 9)
    store.close()
    content = place.last().read_bytes()
    assert size and groups(before) == [0, 1] and begins < len(content)
    for length in range(begins, len(content)):
        os.truncate(place.last(), length)
        assert place.rebuilt() == two, f"{length - begins} bytes of the record"
        place.last().write_bytes(content)
    place.last().write_bytes(content[:begins] + bytes(len(content) - begins))
    assert place.rebuilt() == two, "zeros, as a power cut leaves them"
    place.write(9, machine="b")
    assert groups(place.rebuilt()) == [0, 1, 2, 9], "what comes after it is read"


def test_a_damaged_middle_is_refused_with_what_is_known(tmp_path):
    """Promise: a flipped byte in what was once complete is never taken for a torn end: one line says which
    file, what is known and what to do, and nothing is made."""
    place = Place(tmp_path)
    store = place.start()
    for number in (0, 1):
        transaction(store, number, 9)
    begins = place.last().stat().st_size
    transaction(store, 2, 9)
    ends = place.last().stat().st_size
    transaction(store, 3, 9)
    store.close()
    content = bytearray(place.last().read_bytes())
    for at in range(begins, ends):
        content[at] ^= 0x10
        place.last().write_bytes(content)
        with pytest.raises(Refused) as refused:
            settle(place.folder, place.path("b"), place.lines.append)
        content[at] ^= 0x10
        text = str(refused.value)
        assert text.startswith(f"{place.last()} is damaged at byte {begins}") and "\n" not in text
        assert "known up to transaction 2, step 2." in text and "from a copy" in text
        assert not list(place.path("b").parent.iterdir())


def test_a_lost_segment_is_damage(tmp_path):
    """Promise: transactions that are missing as a whole are noticed, in the middle and at the beginning."""
    place = Place(tmp_path)
    for number in range(3):
        place.write(number)
    for lost in segments(place.folder)[:2]:
        other = place.copy(f"without {lost.number}")
        (other.folder / lost.path.name).unlink()
        with pytest.raises(Refused, match="is damaged at byte"):
            settle(other.folder, other.path("b"), other.lines.append)
    segments(place.folder)[0].path.unlink()
    place.write(3)
    assert groups(place.rebuilt()) == [0, 1, 2, 3] and "the journal begins with a snapshot" in place.lines[0]


def test_a_damaged_snapshot_is_refused(tmp_path):
    """Promise: a flipped byte of a payload in a snapshot, which SQLite would not see, is seen."""
    place = Place(tmp_path)
    place.write(*range(5))
    take_snapshot(place.path(), place.folder, threading.Event(), 10**6)
    [snapshot] = snapshots(place.folder)
    content = bytearray(snapshot.path.read_bytes())
    content[content.index(b"\x04" * 100) + 50] ^= 1
    snapshot.path.write_bytes(content)
    with pytest.raises(Refused, match=f"{snapshot.path} is damaged"):
        settle(place.folder, place.path("b"), place.lines.append)


@pytest.mark.parametrize("lost", ["the end of a segment", "a segment", "a middle byte", "all of it"])
def test_a_store_ahead_of_its_journal_is_the_truth(tmp_path, lost):
    """Promise: what the shared file system has lost or spoilt, the last writer's store still knows: the
    journal is begun anew from it."""
    place = Place(tmp_path)
    place.write(0, 1)
    place.write(2, 3)
    held, content = tables(place.path()), place.last().read_bytes()
    if lost == "the end of a segment":
        os.truncate(place.last(), len(content) - 1)
    elif lost == "a middle byte":
        place.last().write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    else:
        for file in segments(place.folder)[0 if lost == "all of it" else -1 :]:
            file.path.unlink()
    settle(place.folder, place.path(), place.lines.append)
    [line] = place.lines
    assert "the journal begins with a snapshot" in line
    assert place.rebuilt() == held == tables(place.path())
    place.write(4)
    assert groups(place.rebuilt()) == [0, 1, 2, 3, 4] and len(place.lines) == 1


# ---- two histories -----------------------------------------------------------------------------------------


def test_a_history_that_others_did_not_go_on_is_moved_aside(tmp_path):
    """Promise: a machine that comes back with a transaction that the journal had lost when another took over
    does not bring it in again."""
    place = Place(tmp_path)
    place.write(0, 1)
    os.truncate(place.last(), place.last().stat().st_size - 1)
    place.write(5, 6, machine="b")
    settle(place.folder, place.path("a"), place.lines.append)
    assert groups(tables(place.path("a"))) == [0, 5, 6]
    aside = place.path("a").with_name("store.1.sqlite")
    assert groups(tables(aside)) == [0, 1] and str(aside) in place.lines[-1]


def test_what_a_zombie_writes_late_does_not_count(tmp_path):
    """Promise: a controller that was taken for dead and still writes changes nothing for its successor."""
    place = Place(tmp_path)
    zombie = place.start("a")
    transaction(zombie, 0)
    successor = place.start("b")
    transaction(successor, 7)
    transaction(zombie, 1)
    transaction(successor, 8)
    assert groups(place.rebuilt()) == [0, 7, 8]
    zombie.close()
    successor.close()
    with pytest.raises(sqlite3.OperationalError, match="given up"):
        take_snapshot(place.path("a"), place.folder, threading.Event(), 1)
    assert snapshots(place.folder) == []


def test_store_and_journal_of_different_runs_are_refused(tmp_path):
    """Promise: both ids are named, and nothing is changed."""
    one, other = Place(tmp_path / "one"), Place(tmp_path / "other")
    one.write(0)
    other.write(1, 2)
    ids = [journal_id(place.folder) for place in (one, other)]
    before = one.path().read_bytes(), other.last().read_bytes()
    with pytest.raises(Refused) as refused:
        settle(other.folder, one.path(), one.lines.append)
    assert all(store_id in str(refused.value) for store_id in ids) and "store_dir" in str(refused.value)
    assert before == (one.path().read_bytes(), other.last().read_bytes())


def test_without_store_dir_the_journal_is_moved_aside(tmp_path):
    """Promise: a run that goes on in its own folder takes all that the journal knows and leaves it behind, so
    that it cannot be taken for the truth later."""
    place = Place(tmp_path)
    place.write(0, 1)
    store = place.folder.parent / "store.sqlite"
    retire(place.folder, store, place.lines.append)
    assert groups(tables(store)) == [0, 1]
    assert not place.folder.exists() and place.folder.with_name("journal.1").is_dir()


# ---- snapshots ---------------------------------------------------------------------------------------------


def test_a_journal_that_has_grown_gets_a_snapshot_beside_the_loop(tmp_path, monkeypatch):
    """Promise: a snapshot takes the place of older segments while transactions go on, so a rebuild replays a
    bounded part."""
    monkeypatch.setattr(journal, "_SEGMENT_BYTES", 20_000)
    monkeypatch.setattr(journal, "_SNAPSHOT_BYTES", 100_000)
    place = Place(tmp_path)
    store = place.start()
    number = 0
    while len(snapshots(place.folder)) == 0 or segments(place.folder)[0].number == 0:
        transaction(store, number)
        number += 1
        assert number < 20_000, "no snapshot"
    for more in range(number, number + 50):
        transaction(store, more)
    store.close()
    assert groups(place.rebuilt()) == list(range(number + 50)) and place.rebuilt() == tables(place.path())
    assert [p.name for p in place.folder.iterdir() if p.name.startswith(".")] == []


def test_a_segment_that_begins_while_old_ones_are_removed_stays(tmp_path, monkeypatch):
    """Promise: a snapshot's thread removes what is older, and nothing that the loop begins meanwhile."""
    place = Place(tmp_path)
    place.write(*range(3))
    begun = place.folder / segment_name(Position(1, 999))

    def looked_at(folder):
        found = segments(folder)
        begun.touch()
        return found

    monkeypatch.setattr(journal, "segments", looked_at)
    take_snapshot(place.path(), place.folder, threading.Event(), 1)
    assert begun.exists() and [file.number for file in snapshots(place.folder)] == [3]


def test_a_death_between_a_snapshot_and_the_next_transaction_keeps_the_snapshot(tmp_path):
    """Promise: docs/promises.md#journal. Its segment has no transaction and the one of its successor begins
    at the same place: what was before them is in the snapshot alone."""
    place = Place(tmp_path)
    store = place.start()
    for number in range(4):
        transaction(store, number)
    store._journal._begin_segment(store._db)
    take_snapshot(place.path(), place.folder, threading.Event(), 1)
    store.close()
    assert [(file.era, file.number) for file in segments(place.folder)] == [(1, 4)]
    place.start().close()
    assert groups(place.rebuilt()) == [0, 1, 2, 3]
    place.write(4, machine="b")
    place.write(5, machine="a")
    assert groups(place.rebuilt()) == [0, 1, 2, 3, 4, 5]
    assert not [line for line in place.lines if "the journal begins with a snapshot" in line]


def test_a_journal_that_gets_a_snapshot_while_it_is_read_is_whole(tmp_path, monkeypatch):
    """Promise: docs/promises.md#journal. What a live run removes because of a newer snapshot is no damage
    to a report on another machine, which has begun with the one before."""
    place, copied, lives = Place(tmp_path), rebuild._copy_snapshot, [2, 3, 4, 5]

    def slowly(*args) -> int:
        size = copied(*args)
        if lives:  # another segment, and a snapshot behind its beginning
            place.write(lives.pop(0))
            place.write(lives[0])
            take_snapshot(place.path(), place.folder, threading.Event(), lives.pop(0))
        return size

    place.write(1)
    take_snapshot(place.path(), place.folder, threading.Event(), 1)
    monkeypatch.setattr(rebuild, "_copy_snapshot", slowly)
    store = readable_store(place.folder.parent, "not-here")
    assert not lives and tables(store.path) == tables(place.path())
    place.last().write_bytes(b"")
    with pytest.raises(Refused, match="is damaged at byte 0"):
        readable_store(place.folder.parent, "not-here")


def test_a_snapshot_that_is_given_up_leaves_nothing(tmp_path):
    """Promise: the end of the run does not wait for a snapshot, and half of one is never read."""
    place, closing = Place(tmp_path), threading.Event()
    place.write(0)
    closing.set()
    with pytest.raises(sqlite3.OperationalError, match="given up"):
        take_snapshot(place.path(), place.folder, closing, 1)
    (place.folder / ".snapshot_000001").write_bytes(b"half of one, of a controller that was killed")
    assert groups(place.rebuilt()) == [0]


# ---- what cannot be written --------------------------------------------------------------------------------


def test_what_would_not_be_the_same_again_is_refused(tmp_path):
    """Promise: no statement can make store and journal differ."""
    store = Place(tmp_path).start()
    for function in ("random()", "datetime('now')", "CURRENT_TIMESTAMP"):
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            store._db.execute(f"INSERT INTO meta VALUES('odd', {function})")
    with pytest.raises(sqlite3.NotSupportedError):
        store._db.executescript("DELETE FROM meta")
    store.commit()
    store._db.execute("COMMIT")
    with pytest.raises(sqlite3.ProgrammingError, match="outside a transaction"):
        store._db.execute("DELETE FROM meta")
    store.close()


def test_a_full_shared_disk_ends_the_run_and_harms_nothing(tmp_path):
    """Promise: the transaction is neither committed nor half-written in between, also when the store is
    closed after it; the error is that of a full disk."""
    place = Place(tmp_path)
    place.write(0)
    store = place.start()
    transaction(store, 1)
    held, full = place.rebuilt(), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, store._journal._file)
    with pytest.raises(OSError) as raised:
        transaction(store, 2)
    assert is_full_disk(raised.value)
    with pytest.raises(OSError):
        store.close()
    os.close(full)
    assert place.rebuilt() == held == tables(place.path())
    place.write(2)
    assert groups(place.rebuilt()) == [0, 1, 2] and place.lines == []


def test_a_slow_or_hanging_shared_disk_is_said(tmp_path, monkeypatch):
    """Promise: never a hang without a word: a write that is not answered is said while it waits, and slow
    ones once."""
    monkeypatch.setattr(journal_watch, "_STUCK_SECONDS", 0.05)
    monkeypatch.setattr(journal_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(journal_watch, "_SLOW_SECONDS", 0.0)
    lines: list[str] = []
    watch = JournalWatch(tmp_path, lines.append)
    with watch:
        waited(lambda: lines, "the warning")
        assert f"the journal {tmp_path} has not answered for" in lines[0]
    assert "answers again" in lines[1] and "every turn of the controller waits" in lines[2]
    with watch:
        pass
    watch.close()
    assert len(lines) == 3


# ---- a controller that was replaced ------------------------------------------------------------------------


class Replaced(Exception):
    """What the lock of the run raises."""


def test_eras_are_given_once(tmp_path):
    """Promise (docs/promises.md#one-controller): whoever comes later has a later era, also if those
    before have written nothing."""
    folder = tmp_path / "journal"
    assert [claim_era(folder) for _ in range(3)] == [1, 2, 3] and claim_era(folder, after=9) == 10
    with ThreadPoolExecutor(8) as pool:
        eras = list(pool.map(lambda _: claim_era(folder), range(64)))
    assert len(set(eras)) == 64 and min(eras) == 11


def test_a_commit_of_a_controller_that_was_replaced_is_refused(tmp_path):
    """Promise (docs/promises.md#one-controller): it neither returns nor changes the store, so nobody is
    told; the next one is told nothing of it either once it has begun."""
    place, replaced = Place(tmp_path), list[str]()

    def assure() -> None:
        if replaced:
            raise Replaced

    place.write(0)
    store = place.start(assure=assure)
    transaction(store, 1)
    successor = place.start("b")
    transaction(successor, 7)
    replaced.append("by b")
    for _ in range(2):
        with pytest.raises(Replaced):
            transaction(store, 2)
        store.roll_back()
        store._db.execute("BEGIN IMMEDIATE")
    store.roll_back()
    store.close()
    successor.close()
    assert groups(tables(place.path())) == [0, 1]
    assert groups(place.rebuilt()) == [0, 1, 7]


class Controllers:
    """Lives of controllers of one run, of which all but the newest may do anything at any time: they have
    stood still, and have not noticed that they were replaced. `told`: what was acknowledged."""

    def __init__(self, place: Place) -> None:
        self.place, self.told = place, set[int]()
        self.eras: dict[int, int] = {}
        self.stores: dict[int, Store] = {}

    def is_newest(self, life: int) -> bool:
        return self.eras[life] == max(self.eras.values())

    def begin(self, life: int) -> None:
        self.end(life)
        self.eras[life] = claim_era(self.place.folder)

    def end(self, life: int) -> None:
        """Dies with an open transaction."""
        if store := self.stores.pop(life, None):
            store.roll_back()
            store.close()

    def store(self, life: int) -> Store:
        """Read from the journal when it is first used."""
        if life not in self.stores:
            era = self.eras[life]
            self.stores[life] = self.place.start(f"machine{era}", era, lambda: self.is_newest(life))
        return self.stores[life]

    def write(self, life: int, number: int) -> None:
        transaction(self.store(life), number)
        if self.is_newest(life):
            self.told.add(number)

    def snapshot(self, life: int) -> None:
        path, era = self.store(life).path, self.eras[life]
        with mock.patch.object(journal, "newest_era", lambda _: 0):  # it has looked before
            take_snapshot(path, self.place.folder, threading.Event(), era, lambda: self.is_newest(life))


LIVES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["begin", "write", "write", "snapshot"])))


@settings(max_examples=40, deadline=None)
@given(steps=LIVES)
@example(  # life 1 begins its first segment when life 0, behind it, has begun one on another transaction
    [(1, "begin"), (1, "snapshot"), (0, "write"), (0, "begin"), (0, "write"), (1, "write")]
)
def test_whatever_replaced_controllers_still_write(tmp_path_factory, steps):
    """Promise (docs/promises.md#one-controller): what a controller has acknowledged before it was
    replaced is known to all that come later, and whatever it writes when it wakes up, transactions, segments
    or snapshots, changes nothing of what its successors have written."""
    place = Place(tmp_path_factory.mktemp("eras"))
    lives = Controllers(place)
    steps = [(0, "begin"), (0, "write"), *steps, (3, "begin"), (3, "write")]
    with mock.patch.object(journal, "_SEGMENT_BYTES", 3_000):
        for number, (life, step) in enumerate(steps):
            if step == "begin" or life not in lives.eras:
                lives.begin(life)
            elif step == "write":
                lives.write(life, number)
            else:
                lives.snapshot(life)
    held = place.rebuilt()
    assert lives.told <= set(groups(held))
    assert held == tables(lives.stores[3].path)
    for life in list(lives.stores):
        lives.end(life)
