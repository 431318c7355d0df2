"""`laminar export RUN_DIR [--format jsonl|parquet] [--steps A:B] --out PATH`, or `--merged DIR` (merged.py).
What is written appears when complete."""

import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.report.export.batches import TEXTS, batches
from laminar_hpc.store.archive import table
from laminar_hpc.store.run_files import metrics_of

_STEPS = re.compile(r"(\d*):(\d*)|(\d+)")
Write = Callable[[pa.RecordBatch], None]


def main(options: Namespace) -> int:
    """The exit code, 0. Raises LaminarError for what cannot be exported."""
    run_dir, target = Path(options.words[0]), options.out
    if options.merged:
        return _merged(options)
    if not target:
        raise Refused(["laminar export needs --out PATH, the file to write"])
    suffix = Path(target).suffix.removeprefix(".")
    kind = options.format or {"": "jsonl", "json": "jsonl"}.get(suffix, suffix)
    if kind not in _WRITERS:
        what = f"--format {kind}" if options.format else f"--out {target}"
        raise Refused([f"{what}: use jsonl or parquet, by the name of the file or with --format"])
    first, last = _steps(options.steps)
    metrics_of(run_dir)
    if Path(target).exists():
        raise Refused([f"--out {target} exists; name another file"])
    count = _export(run_dir, kind, Path(target), first, last)
    print(f"{target}: {count:,} trajectories")
    return 0


def _merged(options: Namespace) -> int:
    from laminar_hpc.report.export.merged import export_merged  # with torch, which takes a second

    if options.out or options.format or options.steps != ":":
        raise Refused(["--merged writes a model, the other options trajectories; use one or the other"])
    print(export_merged(Path(options.words[0]), Path(options.merged)))
    return 0


def _export(run_dir: Path, kind: str, target: Path, first: int, last: int | None) -> int:
    count, found = 0, batches(run_dir, first, last, print)
    head = next(found, None)  # whatever is wrong with the run is said before a file is begun
    with _complete(target) as beside, _WRITERS[kind](beside) as write:
        for batch in chain([] if head is None else [head], found):
            write(batch)
            count += batch.num_rows
    return count


def _steps(words: str) -> tuple[int, int | None]:
    """The first and the last step; None means to the end."""
    found = _STEPS.fullmatch(words)
    if not found:
        raise Refused([f"--steps {words}: write A:B, the first step and the last, as --steps 1:20"])
    if found[3]:
        return int(found[3]), int(found[3])
    first, last = int(found[1] or 1), int(found[2]) if found[2] else None
    if last is not None and last < first:
        raise Refused([f"--steps {words}: no step is in it; write A:B with A <= B"])
    return first, last


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """Gives a file beside the target, which gets the target's name when nothing failed."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield beside
        beside.rename(target)
    except OSError as error:
        raise LaminarError(f"--out {target} cannot be written ({error.strerror or error})") from None
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _jsonl(path: Path) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8") as file:

        def write(batch: pa.RecordBatch) -> None:
            for row in batch.to_pylist():
                row["reward_parts"] = json.loads(row["reward_parts"])
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

        yield write


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    with table.writer(path, pa.unify_schemas([table.SCHEMA, TEXTS])) as file:
        yield file.write_batch


_WRITERS = {"jsonl": _jsonl, "parquet": _parquet}
