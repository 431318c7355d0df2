"""Trained responses as rows of a Parquet file, and back: exactly the columns of store/payload/layout.py, with
the record and the prompt beside them. No Python object is made for a token.

Token ids are split by byte before they are compressed (BYTE_STREAM_SPLIT, zstd), as their upper bytes are
alike. Behaviour log-probs stay the exact float32 values; those of likely tokens come again and again, as a
softmax rounds them, and are found whole. Only this file and report/export/ import pyarrow, which takes a
second: store/archive/files.py imports it when a file is written or read.
"""

import json
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from laminar_hpc.line.messages.data import Trajectory, VersionSpan
from laminar_hpc.store.payload.layout import DamagedResponse, Response
from laminar_hpc.store.payload.whole import Whole

_TOKENS = pa.list_(pa.int32())
_SPAN = pa.struct([("weight_id", pa.int64()), ("start", pa.int64()), ("end", pa.int64())])
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # that trained it, from 1; null = none has yet
        ("staleness", pa.int64()),  # trainer steps between its weights and those that it trained
        *((name, pa.int64()) for name in ("group_id", "trajectory_id", "attempt", "replica")),
        *((name, pa.int64()) for name in ("weight_id", "weight_step", "step_finished", "moves")),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),  # JSON
        ("reward_error", pa.string()),
        *((name, pa.float64()) for name in ("time_started", "time_finished", "time_scored")),
        ("digest", pa.string()),
        ("prompt_tokens", _TOKENS),
        ("response_tokens", _TOKENS),
        ("logprobs", pa.list_(pa.float32())),
        ("mask_runs", pa.list_(pa.uint32())),  # of store/payload/layout.py
        ("version_spans", pa.list_(_SPAN)),
    ]
)
_BY_BYTE = ("prompt_tokens", "response_tokens")
# of zstd, for the column in which values come again: a seventh smaller than at its default
_LEVELS = {"logprobs.list.element": 6}
_RECORD = [name for name in SCHEMA.names if name in Trajectory.__struct_fields__ and name != "reward_parts"]


@contextmanager
def _pyarrow_errors() -> Iterator[None]:
    """Turns errors of pyarrow into DamagedResponse, the only one that others know."""
    try:
        yield
    except pa.ArrowException as error:
        raise DamagedResponse(str(error)) from None


@_pyarrow_errors()
def batch_of(step: int | None, wholes: Sequence[Whole]) -> pa.RecordBatch:
    """`step`: that trained them, from 1. Raises DamagedResponse for what no columns can be made of."""
    records = [whole.record for whole in wholes]
    columns: dict[str, object] = {name: [getattr(record, name) for record in records] for name in _RECORD}
    columns["step"] = [step] * len(records)
    columns["staleness"] = [None if step is None else step - 1 - r.weight_step for r in records]
    columns["reward_parts"] = [json.dumps(record.reward_parts) for record in records]
    columns["prompt_tokens"] = _lists([whole.prompt for whole in wholes], np.int32)
    columns["response_tokens"] = _lists([whole.response.tokens for whole in wholes], np.int32)
    columns["logprobs"] = _lists([whole.response.logprobs for whole in wholes], np.float32)
    columns["mask_runs"] = _lists([whole.response.mask_runs for whole in wholes], np.uint32)
    columns["version_spans"] = [
        [{"weight_id": span.weight_id, "start": span.start, "end": span.end} for span in whole.response.spans]
        for whole in wholes
    ]
    given = ((columns[f.name], f.type) for f in SCHEMA)
    arrays = [column if isinstance(column, pa.Array) else pa.array(column, kind) for column, kind in given]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _lists(rows: Sequence[np.ndarray], dtype: type) -> pa.Array:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    values = np.concatenate(rows) if rows else np.empty(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))


@contextmanager
def writer(path: Path, schema: pa.Schema = SCHEMA) -> Iterator[pq.ParquetWriter]:
    """Of a file with these columns. Raises OSError, and DamagedResponse for rows that it cannot hold."""
    by_byte = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _BY_BYTE}
    others = [name for name in schema.names if name not in (*_BY_BYTE, "logprobs")]
    with (
        _pyarrow_errors(),
        pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=_LEVELS,
            column_encoding=by_byte,
            use_dictionary=others,
            write_statistics=False,
        ) as file,
    ):
        yield file


def read(path: Path, only: Container[int] | None = None) -> Iterator[Whole]:
    """Row by row, without places; `only`: these trajectories. Raises OSError, DamagedResponse."""
    with _pyarrow_errors(), pq.ParquetFile(path) as file:
        if not file.schema_arrow.equals(SCHEMA):
            raise DamagedResponse("it has other columns than a file of the archive")
        for group in range(file.num_row_groups):
            if only is not None:
                [ids] = file.read_row_group(group, ["trajectory_id"]).to_pydict().values()
                if not any(i in only for i in ids):
                    continue
            for batch in file.iter_batches(batch_size=64, row_groups=[group]):
                yield from (row for row in _rows(batch) if only is None or row.record.trajectory_id in only)


def _rows(batch: pa.RecordBatch) -> Iterator[Whole]:
    names = (*_RECORD, "reward_parts", "version_spans", "step", "staleness")
    lists = [
        (column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False))
        for column in map(batch.column, ("prompt_tokens", "response_tokens", "logprobs", "mask_runs"))
    ]
    for i, row in enumerate(batch.select(names).to_pylist()):
        spans = [VersionSpan(**span) for span in row.pop("version_spans")]
        prompt, tokens, logprobs, runs = (values[offsets[i] : offsets[i + 1]] for offsets, values in lists)
        response = Response(
            row["trajectory_id"], row["attempt"], tokens, logprobs, spans, runs, row["digest"]
        )
        row["reward_parts"] = json.loads(row["reward_parts"])
        step, staleness = row.pop("step"), row.pop("staleness")
        if step is not None and staleness != step - 1 - row["weight_step"]:
            text = f"trajectory {row['trajectory_id']} of weight step {row['weight_step']}"
            raise DamagedResponse(f"{text} has staleness {staleness} at step {step}")
        known: dict[str, Any] = {
            "length": len(tokens),
            "trained": response.trained,
            "policies": len({s.weight_id for s in spans}),
        }
        yield Whole(Trajectory(**row, **known), prompt, response)
