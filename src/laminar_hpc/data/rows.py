"""Rows of a JSONL or Parquet file, a folder, or a Hugging Face dataset, each with the words that name its
place. Imports no torch.

JSONL may be compressed (.gz, .zst). pyarrow and datasets are imported where they are needed: plain and
gzipped JSONL need neither.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import COMPRESSED, Source, parse_source

_BATCH = 1024  # rows turned into Python objects at a time
_LONGEST_ROW = 64 << 20  # bytes of a JSONL row: a larger one is some other kind of file
_FIRST_ROWS = 8  # looked at before anything starts


def read_rows(source: Source) -> Iterator[tuple[str, dict]]:
    """(place, row) of every row in order, rows counted from 1. Raises LaminarError that names file and row,
    and the cure."""
    readers = {"jsonl": _jsonl, "parquet": _parquet, "folder": _dataset, "hub": _dataset}
    return readers[source.kind](source)


def field(row: dict, names: str, where: str, key: str) -> object:
    """The value at the first of `names` that the row has: `a.b|c` is row["a"]["b"], else row["c"]. `key` is
    the setting that names them."""
    for name in names.split("|"):
        if name in row:
            return row[name]
        value: object = row
        for part in name.split("."):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                break
        else:
            return value
    raise LaminarError(
        f"{where}: no field '{names}' (it has: {', '.join(map(str, row))}); set {key} or mend the row"
    )


def wrong_first_rows(config: RunConfig) -> list[str]:
    """One line for each file of the configuration that cannot be read, has no rows, or lacks a field in its
    first ones.

    In well under a second, whatever the file's size. Files that are not there are left to `config.check`,
    datasets to the controller."""
    lines = []
    files = [("evaluation.files", name) for name in config.evaluation.files]
    for key, name in [("data.train", config.data.train), *files]:
        try:
            source = parse_source(key, name)
        except LaminarError:
            continue
        try:
            if source.kind in ("jsonl", "parquet") and not config.source.startswith("replay:"):
                _check_first_rows(source, config)
        except LaminarError as error:
            lines.append(str(error))
    return lines


def _check_first_rows(source: Source, config: RunConfig) -> None:
    rows = 0
    for where, row in islice(read_rows(source), _FIRST_ROWS):
        rows += 1
        field(row, config.data.prompt_field, where, "data.prompt_field")
        if config.data.answer_field:
            field(row, config.data.answer_field, where, "data.answer_field")
    if not rows:
        raise LaminarError(f"{source.path} has no rows; one row per prompt is needed")


def _open(path: str) -> IO[bytes]:
    """The plain bytes of a file that may be compressed."""
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.open(path))
    if path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return open(path, "rb")


def _jsonl(source: Source) -> Iterator[tuple[str, dict]]:
    number = 0
    try:
        with _open(source.path) as file:
            while line := file.readline(_LONGEST_ROW + 1):
                number += 1
                where = f"{source.path}, row {number}"
                if len(line) > _LONGEST_ROW:
                    limit = f"{_LONGEST_ROW >> 20} MiB"
                    raise LaminarError(f"{where}: longer than {limit}; one JSON object per line is needed")
                yield where, _object(line, where)
    except (OSError, EOFError, zlib.error) as error:
        what = "read" if not source.path.endswith(COMPRESSED) else "unpacked"
        raise LaminarError(
            f"{source.path}, row {number + 1}: cannot be {what} "
            f"({_first_line(error)}); write or download the file again"
        ) from None


def _object(line: bytes, where: str) -> dict:
    if not line.strip():
        raise LaminarError(f"{where}: an empty line; take it out")
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LaminarError(f"{where}: not UTF-8 (byte {error.start}); convert the file") from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
        raise LaminarError(f"{where}: not JSON ({what}); one JSON object per line is needed") from None
    if not isinstance(row, dict):
        raise LaminarError(
            f"{where}: a {type(row).__name__}, not an object with fields; one JSON object per line is needed"
        )
    return row


def _parquet(source: Source) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            for batch in file.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{source.path}, row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also of a date
        raise LaminarError(
            f"{source.path}, row {number + 1}: cannot be read as Parquet "
            f"({_first_line(error)}); write or download the file again"
        ) from None


def _dataset(source: Source) -> Iterator[tuple[str, dict]]:
    import datasets

    path = Path(source.path)
    datasets.disable_progress_bars()
    try:
        if source.kind == "folder" and any(
            (path / name).exists() for name in ("state.json", "dataset_dict.json")
        ):
            loaded = datasets.load_from_disk(source.path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[source.split]
        else:
            loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:  # the library raises what its parts raise
        raise LaminarError(
            f"{source.path} cannot be loaded as a Hugging Face dataset, subset "
            f"{source.subset or '(none)'}, split {source.split} ({type(error).__name__}: "
            f"{_first_line(error)}); check name and network, or download it and name its folder or file"
        ) from None
    number = 0
    for first in range(0, len(loaded), _BATCH):
        for row in loaded.select(range(first, min(first + _BATCH, len(loaded)))).to_list():
            number += 1
            yield f"{source.path} ({source.split}), row {number}", row


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
