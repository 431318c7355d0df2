"""RUN_DIR/archive: step_000001.parquet and so on, by the number that the console shows. A file has its name
when all of it is on the disk."""

import contextlib
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from laminar_hpc.machine.files.durable import FileSum, seal, sync_folder
from laminar_hpc.policies.retention import kept
from laminar_hpc.store.payload.whole import Whole

FOLDER = "archive"
_NAME = re.compile(r"step_(\d{6,})\.parquet")


def path_of(run_dir: Path, step: int) -> Path:
    """Where the file of trainer step `step`, from 1, is or would be."""
    return run_dir / FOLDER / f"step_{step:06d}.parquet"


def steps(run_dir: Path) -> list[int]:
    """The steps that have a file, ascending."""
    folder = run_dir / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)


def write(run_dir: Path, step: int, parts: Iterable[list[Whole]]) -> FileSum:
    """The sum of the step's file, which replaces one that may be there; `parts` are written one after the
    other. Raises OSError and layout.DamagedResponse, and then there is no such file."""
    from laminar_hpc.store.archive import table

    path = path_of(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    try:
        with table.writer(beside) as file:
            for part in parts:
                file.write_batch(table.batch_of(step, part))
        found = seal(beside)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)
    return found


def read(path: Path, only: Container[int] | None = None) -> Iterator[Whole]:
    """Reads as `table.read` does."""
    from laminar_hpc.store.archive import table

    return table.read(path, only)


def prune(run_dir: Path, rule: str, newest: int) -> None:
    """Removes what `rule` (policies/retention.py) does not keep, and what a writer that died has left."""
    for step in steps(run_dir):
        if step <= newest and not kept(rule, step, newest):
            path_of(run_dir, step).unlink(missing_ok=True)
    for left in (run_dir / FOLDER).glob(".*.new"):
        with contextlib.suppress(OSError):
            left.unlink()
