"""Rows of the store and lines of metrics.jsonl that something else than the run has changed, by their seals
(store/seals.py, machine/files/jsonl.py)."""

from collections.abc import Iterator

from laminar_hpc.machine.files import jsonl
from laminar_hpc.store.audit.records import Records, StoreRecords
from laminar_hpc.store.checkpoints import checkpoint_path, is_listed
from laminar_hpc.store.seals import ARCHIVE, PROMPTS, UNSEALED_KEY, key_of, seal_of, sealed_tables

METRICS = "metrics.jsonl"


def rows_are_as_written(records: Records, store: StoreRecords) -> Iterator[str | None]:
    """Each has its seal, and each seal its row; a prompt's row may have left for the archive."""
    read = store.connection.cursor()
    tables = sealed_tables(read)
    if not read.execute("SELECT 1 FROM sqlite_master WHERE name = 'seals'").fetchone():
        yield "the store has lost its seals" if records.all_sealed else None
        return
    archived = "COALESCE((SELECT value + 0 FROM meta WHERE key = 'archived_steps'), 0)"
    needed = f"(state IN ('granted', 'finished') OR consumed_step >= {archived})"
    for table, keys in tables.items():
        # with the affinity of its column, which `+` takes off, SQLite would not use the index of the seals
        match = " AND ".join(f"{seal} = +{of}" for seal, of in zip("ab", [*keys, "''"], strict=False))
        found = f"{table} t LEFT JOIN seals ON kind = '{table}' AND {match}"
        for seal, a, b, *row in read.execute(f"SELECT seals.digest, {key_of(keys, 't.')}, t.* FROM {found}"):
            known = seal == seal_of(tuple(row)) or (seal is None and not records.all_sealed)
            known = known or (table == "meta" and a == UNSEALED_KEY)
            yield None if known else f"{_name(table, a, b)} is not as the run wrote it"
        gone = f"kind = '{table}' AND NOT EXISTS(SELECT 1 FROM {table} WHERE {match.replace('+', '')})"
        if table == PROMPTS:
            gone += f" AND EXISTS(SELECT 1 FROM groups WHERE id = a AND {needed})"
        for a, b in read.execute(f"SELECT a, b FROM seals WHERE {gone}"):
            yield f"{_name(table, a, b)} is gone"
    kinds = ", ".join(f"'{name}'" for name in (*tables, ARCHIVE))
    for seal in read.execute(f"SELECT kind, a, b FROM seals WHERE kind NOT IN ({kinds})"):
        yield f"{_name('seals', *seal)} is not as the run wrote it"


def _name(table: str, *key: object) -> str:
    return f"the store's row {' '.join(str(part) for part in key).strip()} of {table}"


def lines_are_as_written(records: Records, _: StoreRecords) -> Iterator[str | None]:
    """Of metrics.jsonl. Those before the first with a seal may be an earlier version's."""
    sealed = records.all_sealed
    for number, intact in enumerate(jsonl.seals(records.run_dir / METRICS), 1):
        sealed = sealed or intact is not None
        yield f"{METRICS}: line {number} is not as the run wrote it" if sealed and not intact else None


def not_proven(records: Records) -> str:
    """What no check can see, in one line; "" where all can be seen."""
    newest = max(records.checkpoints, default=None)
    lacks = []
    if records.store is not None and not records.all_sealed:
        lacks.append(f"rows of the store, files of the archive and lines of {METRICS} without a seal")
    if newest is not None and not is_listed(checkpoint_path(records.run_dir, newest)):
        lacks.append(f"the checkpoint of step {newest}")
    what = " and ".join(lacks)
    return f"not proven: {what} are as they were written; an earlier version kept no digests" if lacks else ""
