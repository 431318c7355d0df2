"""The scored trajectories of a run with their texts, in parts: what `laminar export` writes, and
`Run.trajectories` gives."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.report.export import rows
from laminar_hpc.store.archive import table
from laminar_hpc.store.payload.layout import DamagedResponse
from laminar_hpc.store.run_files import config_of, metrics_of
from laminar_hpc.store.store_copy import readable_store
from laminar_hpc.store.store_layout import connect_read_only, has_tables

TEXTS = pa.schema([("prompt", pa.string()), ("response", pa.string())])


def batches(
    run_dir: Path, first: int = 1, last: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Iterator[pa.RecordBatch]:
    """Those that the steps `first` to `last` have trained; with `last` None also what no step has trained
    yet. `say` hears what is left out. Raises LaminarError where there is no run, no store, or one that cannot
    be read."""
    metrics_of(run_dir)
    config = config_of(run_dir)
    store = readable_store(run_dir, config.get("store_dir"))
    none = LaminarError(f"{run_dir} has no store yet, at {store.path}; wait for the run's first step")
    if not store.path.is_file():
        raise none
    try:
        with closing(connect_read_only(store.path, 10.0)) as db:
            if not has_tables(db, store.path):
                raise none
            texts = _texts(config, say)
            if gone := rows.lost(db, run_dir, first, last):
                say(f"left out: {len(gone)} steps that are not kept (archive={config.get('archive')})")
            for step, part in rows.parts(db, run_dir, first, last):
                yield texts(table.batch_of(step, part))
    except (sqlite3.Error, DamagedResponse) as error:
        raise LaminarError(f"{run_dir} cannot be read ({error}); look at it with laminar audit") from None


def _texts(config: dict, say: Callable[[str], None]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Adds the texts; empty where the model's folder has no tokenizer.json."""
    path = Path((config.get("model") or {}).get("path") or "") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    if tokenizer is None:
        say(f"without texts: {path} is not there, so only token ids are written")

    def with_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
        for name, tokens in (("prompt", "prompt_tokens"), ("response", "response_tokens")):
            ids = batch.column(tokens).to_pylist()
            said = tokenizer.decode_batch(ids, skip_special_tokens=False) if tokenizer else [None] * len(ids)
            batch = batch.append_column(TEXTS.field(name), pa.array(said, pa.string()))
        return batch

    return with_texts
