"""`laminar export RUN_DIR [--format jsonl|parquet] [--steps A:B] --out PATH`, or `--merged DIR` (merged.py).
What is written appears when complete."""

import json
import os
import re
import sqlite3
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.report.export import rows
from laminar_hpc.store.archive import table
from laminar_hpc.store.payload.layout import DamagedResponse
from laminar_hpc.store.run_files import config_of, metrics_of
from laminar_hpc.store.store_copy import readable_store
from laminar_hpc.store.store_layout import connect_read_only, has_tables

_STEPS = re.compile(r"(\d*):(\d*)|(\d+)")
_TEXTS = pa.schema([("prompt", pa.string()), ("response", pa.string())])
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
    config = config_of(run_dir)
    if Path(target).exists():
        raise Refused([f"--out {target} exists; name another file"])
    try:
        count = _export(run_dir, config, kind, Path(target), first, last)
    except (sqlite3.Error, DamagedResponse) as error:
        raise LaminarError(f"{run_dir} cannot be read ({error}); look at it with laminar audit") from None
    print(f"{target}: {count:,} trajectories")
    return 0


def _merged(options: Namespace) -> int:
    from laminar_hpc.report.export.merged import export_merged  # with torch, which takes a second

    if options.out or options.format or options.steps != ":":
        raise Refused(["--merged writes a model, the other options trajectories; use one or the other"])
    print(export_merged(Path(options.words[0]), Path(options.merged)))
    return 0


def _export(run_dir: Path, config: dict, kind: str, target: Path, first: int, last: int | None) -> int:
    store = readable_store(run_dir, config.get("store_dir"))
    none = LaminarError(f"{run_dir} has no store yet, at {store.path}; wait for the run's first step")
    if not store.path.is_file():
        raise none
    with closing(connect_read_only(store.path, 10.0)) as db:
        if not has_tables(db, store.path):
            raise none
        texts, count = _texts(config), 0
        gone = rows.lost(db, run_dir, first, last)
        if gone:
            print(f"left out: {len(gone)} steps that are not kept (archive={config.get('archive')})")
        with _complete(target) as beside, _WRITERS[kind](beside) as write:
            for step, part in rows.parts(db, run_dir, first, last):
                write(texts(table.batch_of(step, part)))
                count += len(part)
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


def _texts(config: dict) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Adds the texts; empty where the model's folder has no tokenizer.json."""
    path = Path((config.get("model") or {}).get("path") or "") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    if tokenizer is None:
        print(f"without texts: {path} is not there, so only token ids are written")

    def with_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
        for name, tokens in (("prompt", "prompt_tokens"), ("response", "response_tokens")):
            ids = batch.column(tokens).to_pylist()
            said = tokenizer.decode_batch(ids, skip_special_tokens=False) if tokenizer else [None] * len(ids)
            batch = batch.append_column(_TEXTS.field(name), pa.array(said, pa.string()))
        return batch

    return with_texts


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
    with table.writer(path, pa.unify_schemas([table.SCHEMA, _TEXTS])) as file:
        yield file.write_batch


_WRITERS = {"jsonl": _jsonl, "parquet": _parquet}
