"""Somebody removes the store of a live run, or writes into it."""

import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from helpers.control.script import Script
from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from helpers.runs import assert_clean
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.loop import Controller
from laminar_hpc.line.messages.training import Checkpointed
from laminar_hpc.store.store import Store

NOISE = os.urandom(1 << 16)


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def scribble(path: Path) -> None:
    """Over all but the first pages, in place."""
    size = path.stat().st_size
    assert size > 40_000
    with open(path, "rb+") as file:
        file.seek(8192)
        file.write(NOISE[: size - 8192])


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE trajectories(id)")


@pytest.mark.parametrize(
    ("harm", "apart", "says"),
    [
        (remove, False, "store.sqlite was removed or replaced while"),
        (scribble, False, r"store.sqlite was damaged \("),
        (empty, False, r"store.sqlite was damaged \(it is empty\)"),
        (replace, False, "store.sqlite was removed or replaced while"),
        (scribble, True, r"store.sqlite was damaged \("),
    ],
)
def test_a_live_run_makes_its_store_again(tmp_path, harm: Callable, apart: bool, says: str):
    """Promise: docs/promises.md#store-harmed. It is found in the next turn and said once; the run goes on
    to its end, loses nothing, and its records are clean. The same where the store lies apart, beside a
    journal."""
    config = small_config(tmp_path)
    if apart:
        config.store_dir = str(tmp_path / "apart")
    harmed = []

    def each_turn(controller: Controller) -> None:
        if not harmed and controller.state.trainer_step == 1:
            controller.store._db.execute("PRAGMA wal_autocheckpoint=1")
            while controller.store.path.stat().st_size <= 40_000 and not controller.state.finished:
                controller.turn()  # as in a long run, not all is in the log
            harm(controller.store.path)
            said = len(stand.lines)
            controller.turn()
            harmed.extend(stand.lines[said:])

    stand = Stand(config, each_turn=each_turn)
    stand.run(60)
    assert len([line for line in stand.lines if "made again from memory" in line]) == 1
    assert re.search(says, "\n".join(harmed)) and "nothing is lost" in harmed[0]
    if not apart:
        assert_every_one_ended_once(config)


def test_harm_within_a_turn_ends_the_run_in_one_line(tmp_path):
    """Promise: docs/promises.md#store-harmed. Where a turn reads what was damaged a moment before, the
    run ends in one line, and the store is as of the last turn: a resume goes on from it."""
    config = small_config(tmp_path)
    script = Script(config)
    store, look = script.controller.store, script.controller.store.look
    script.publish(0, 0)
    script.rollout(0)
    script.asks(0, 0, 0)
    before = store.rows.live_groups()
    assert before

    def harmed() -> None:
        look()
        store._db.execute("COMMIT")
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store._db.execute("PRAGMA shrink_memory")
        store._db.execute("BEGIN IMMEDIATE")
        scribble(store.path)

    store.look = harmed
    with pytest.raises(LaminarError, match=r"was damaged while the run used it \(database disk image") as one:
        script.rollout(1)
        script.asks(1, 0, 0)
    assert "\n" not in str(one.value) and "go on with resume=auto" in str(one.value)
    store.look = look
    script.closes()
    again = Store(Path(config.run_dir))
    assert again.rows.live_groups() == before
    again.close()
    assert_clean(Path(config.run_dir))


def test_all_of_it_is_read_at_each_checkpoint(tmp_path):
    """Promise: docs/promises.md#store-harmed. Noise that left no trace in the file's times is found
    there."""
    script = Script(small_config(tmp_path))
    store, said = script.controller.store, []
    store._say = said.append
    store._db.execute("PRAGMA wal_autocheckpoint=1")
    script.publish(0, 0)
    script.rollout(0)
    script.asks(0, 0, 0)
    times = store.path.stat()
    scribble(store.path)
    os.utime(store.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    script.controller.turn()
    assert not said
    script.hear("trainer", 0, Checkpointed(1, "there", 1.0, ""))
    script.controller.turn()
    assert len(said) == 1 and "was damaged" in said[0]
    script.ends_clean()
