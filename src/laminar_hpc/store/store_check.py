"""Whether a run can go on with its store: looked at before anything is opened for writing.

With an older or an empty store a run would train trajectories twice and break its staleness bound, without a
sign.
"""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.store.checkpoints import checkpoint_path, going_on_from, store_id
from laminar_hpc.store.full_disk import is_full_disk
from laminar_hpc.store.store_layout import connect_read_only, meta


def check_store(path: Path, run_dir: Path, restored_step: int, replay: bool, seconds: float) -> None:
    """Raises Refused if the store at `path` is damaged, or older than the checkpoint of `restored_step` (0 =
    none), or that of another run than the checkpoint's.

    Reads all of it, a second per gigabyte or less; after `seconds` it counts as whole. A replay stores no
    trajectories of its own, so it needs no store."""
    if not path.is_file() or path.stat().st_size == 0:
        if restored_step > 0 and not replay:
            raise Refused([_refusal(path, "is missing or empty", run_dir, restored_step)])
        return
    damage, last, own = _read(path, seconds)
    if damage:
        raise Refused([_refusal(path, f"is damaged ({damage})", run_dir, restored_step)])
    if replay or not restored_step:
        return
    wanted = store_id(checkpoint_path(run_dir, restored_step))
    if wanted and own and wanted != own:
        text = f"is the store {own}, and the checkpoint belongs to the store {wanted}"
        raise Refused([_refusal(path, text, run_dir, restored_step)])
    if last < restored_step:
        text = f"is older than the newest checkpoint (it ends at step {max(0, last)})"
        raise Refused([_refusal(path, text, run_dir, restored_step)])


def damage_of(path: Path, seconds: float) -> str:
    """What is wrong with the store at `path`; "" if nothing, or if there is none. `seconds`: as above."""
    return _read(path, seconds)[0] if path.is_file() and path.stat().st_size else ""


def _read(path: Path, seconds: float) -> tuple[str, int, str]:
    """(damage, the last step whose batch is on record, store id)."""
    try:
        with closing(connect_read_only(path)) as connection:
            damage = _quick_check(connection, seconds) if seconds else ""
            if damage:
                return damage, 0, ""
            store_id = meta(connection, "store_id") if _has_table(connection, "meta") else ""
            return "", _last_step(connection), store_id
    except sqlite3.DatabaseError as error:
        if is_full_disk(error):
            raise
        if "locked" in str(error):
            raise Refused([f"{path} is in use by another program; end that one first"]) from None
        return str(error), 0, ""


def _quick_check(connection: sqlite3.Connection, seconds: float) -> str:
    """The first damage that SQLite finds, or ""."""
    timer = threading.Timer(seconds, connection.interrupt)
    timer.start()
    try:
        [(verdict,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        return ""
    finally:
        timer.cancel()
        timer.join()
    return "" if verdict == "ok" else " ".join(verdict.split())


def _last_step(connection: sqlite3.Connection) -> int:
    """The last step whose batch is on record; 0 where none is."""
    if not _has_table(connection, "groups"):
        return 0
    rows = connection.execute("SELECT MAX(consumed_step) + 1 FROM groups WHERE state = 'consumed'")
    return rows.fetchone()[0] or 0


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone())


def _refusal(path: Path, what: str, run_dir: Path, restored_step: int) -> str:
    if restored_step < 1:
        return (
            f"{path} {what}; nothing was changed: no checkpoint needs it yet, so move it away and start again"
        )
    weights = going_on_from(checkpoint_path(run_dir, restored_step))
    return (
        f"{path} {what}; nothing was changed: restore it from a copy that is not older than the checkpoint "
        f"of step {restored_step}, or begin another run with that checkpoint's weights: {weights} "
        "run_dir=ANOTHER (the optimizer's state and the trajectories not yet trained are left behind)"
    )
