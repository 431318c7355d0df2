"""Rows of a JSONL or Parquet file, a folder, or a Hugging Face dataset, each with the words that name its
place. Imports no torch.

JSONL may be compressed (.gz, .zst). pyarrow and datasets are imported where they are needed: plain and
gzipped JSONL need neither. The files of a folder are read here too, so that a row is the same in both.
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError, first_line
from laminar_hpc.config.source import COMPRESSED, FILES, Source, plain

_BATCH = 1024  # rows turned into Python objects at a time
_LONGEST_ROW = 64 << 20  # bytes of a JSONL row: a larger one is some other kind of file
_SAVED = ("state.json", "dataset_dict.json")  # by datasets' save_to_disk
_SAID = 400  # characters of the library's words in an error
_NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json")  # beside the files of a dataset
_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}


def read_rows(source: Source) -> Iterator[tuple[str, dict]]:
    """(place, row) of every row in order, counted from 1. Raises LaminarError with file, row and cure."""
    if (files := files_of(source)) is None:
        yield from _dataset(source)
    for path in files or ():
        yield from _parquet(path) if path.endswith(".parquet") else _jsonl(path)


def files_of(source: Source) -> list[str] | None:
    """The files that its rows are in; None where only the library `datasets` knows. Of a plain folder they
    are all of the split: a file is of the split that its name, or its nearest folder's, has as a word, else
    of `train`. Raises LaminarError where there are none."""
    folder = Path(source.path)
    if source.kind in ("jsonl", "parquet"):
        return [source.path]
    if source.kind == "hub" or source.subset or any((folder / name).exists() for name in _SAVED):
        return None
    card = folder / "README.md"
    if card.is_file() and re.search(r"^configs:", card.read_text("utf-8", "replace"), re.M):
        return None
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    inside = [path for path in inside if plain(path).suffix in FILES and path.name not in _NO_ROWS]
    if not (inside := [path for path in inside if not any(part[0] in "._" for part in path.parts)]):
        return None
    if found := [str(folder / path) for path in inside if _is_of(source.split, path)]:
        return found
    raise LaminarError(
        f"{folder} has no file of split {source.split} (it has: {', '.join(map(str, inside[:5]))}); name "
        f"another split, as {folder}@test, or a file"
    )


def _is_of(split: str, path: Path) -> bool:
    """Whether a file is of a split, by the words of its place within the folder."""
    splits = {split: re.escape(split)} | _SPLITS
    for part in reversed(path.parts):
        word = r"(?<![a-zA-Z])({})(?![a-zA-Z])"
        if has := [name for name, words in splits.items() if re.search(word.format(words), part, re.I)]:
            return split in has
    return split == "train"


def field(row: dict, names: str, where: str, key: str) -> object:
    """The value at the first of `names` that the row has and that is not null: `a.b|c` is row["a"]["b"], else
    row["c"]. `key` is the setting that names them."""
    found = False
    for name in names.split("|"):
        value: object = row
        for part in [name] if name in row else name.split("."):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                break
        else:
            found = True
            if value is not None:
                return value
    if found:
        return None
    raise LaminarError(
        f"{where}: no field '{names}' (it has: {', '.join(map(str, row))}); set {key} or mend the row"
    )


def _open(path: str) -> io.BufferedReader:
    """The plain bytes of a file that may be compressed."""
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.open(path))
    if path.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return open(path, "rb")


def _jsonl(path: str) -> Iterator[tuple[str, dict]]:
    number = 0
    try:
        with _open(path) as file:
            if path.endswith(".json") and file.peek(1)[:1] == b"[":  # one array, as json.dump writes it
                for row in _parsed(file.read(), f"{path}, row 1"):
                    number += 1
                    yield f"{path}, row {number}", _object(row, f"{path}, row {number}")
            while line := file.readline(_LONGEST_ROW + 1):
                number += 1
                where = f"{path}, row {number}"
                if len(line) > _LONGEST_ROW:
                    limit = f"{_LONGEST_ROW >> 20} MiB"
                    raise LaminarError(f"{where}: longer than {limit}; one JSON object per line is needed")
                if not line.strip():
                    raise LaminarError(f"{where}: an empty line; take it out")
                yield where, _object(_parsed(line, where), where)
    except (OSError, EOFError, zlib.error) as error:
        what = "read" if not path.endswith(COMPRESSED) else "unpacked"
        raise LaminarError(
            f"{path}, row {number + 1}: cannot be {what} "
            f"({first_line(error)[:160]}); write or download the file again"
        ) from None


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LaminarError(f"{where}: not UTF-8 (byte {error.start}); convert the file") from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
        raise LaminarError(f"{where}: not JSON ({what}); one JSON object per line is needed") from None


def _object(row: object, where: str) -> dict:
    if not isinstance(row, dict):
        raise LaminarError(
            f"{where}: a {type(row).__name__}, not an object with fields; one JSON object per line is needed"
        )
    return row


def _parquet(path: str) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also of a date
        raise LaminarError(
            f"{path}, row {number + 1}: cannot be read as Parquet "
            f"({first_line(error)[:160]}); write or download the file again"
        ) from None


def _dataset(source: Source) -> Iterator[tuple[str, dict]]:
    import datasets

    datasets.disable_progress_bars()
    lines: list[str] = []
    loaded: Any = None
    try:
        if source.kind == "folder" and any((Path(source.path) / name).exists() for name in _SAVED):
            loaded = datasets.load_from_disk(source.path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[source.split]
        elif source.kind == "folder":
            builder = datasets.load_dataset_builder(source.path, source.subset)
            lines = [str(file) for file in (builder.config.data_files or {}).get(source.split) or ()]
        if not (lines and all(file.endswith(".jsonl") for file in lines)):  # it would make dates of texts
            lines = []
            if loaded is None:
                loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:  # the library raises what its parts raise
        cure = "check name and network, or download it and name its folder or file"
        if source.kind == "folder":
            cure = "check subset, split and the files in it, or name a file"
        said = " ".join(f"{error} {error.__cause__ or ''}".split())[:_SAID]
        raise LaminarError(
            f"{source.path} cannot be loaded as a Hugging Face dataset, subset "
            f"{source.subset or '(none)'}, split {source.split} ({type(error).__name__}: {said}); {cure}"
        ) from None
    for file in lines:
        yield from _jsonl(file)
    number = 0
    for first in range(0, 0 if lines else len(loaded), _BATCH):
        for row in loaded.select(range(first, min(first + _BATCH, len(loaded)))).to_list():
            number += 1
            yield f"{source.path} ({source.split}), row {number}", row
