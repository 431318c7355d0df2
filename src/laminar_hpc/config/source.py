"""Where rows come from, as one word of the configuration: a file, a folder, or a Hugging Face dataset by
name. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError

FILES = (".jsonl", ".json", ".parquet")
COMPRESSED = (".gz", ".zst")  # a JSONL file may be
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """`kind` is jsonl, parquet, folder or hub. `subset` and `split` are for the latter two."""

    kind: str
    path: str
    subset: str | None = None
    split: str = "train"

    @property
    def label(self) -> str:
        """A short name for plots: the file's stem, or the dataset's last word with its subset and split."""
        if self.kind in ("jsonl", "parquet"):
            return plain(Path(self.path)).stem
        return "-".join([Path(self.path).name, *([self.subset] if self.subset else []), self.split])

    @property
    def longer_label(self) -> str:
        """The same behind the name of its folder or owner."""
        owner = self.path.partition("/")[0] if self.kind == "hub" else Path(self.path).resolve().parent.name
        return f"{owner}-{self.label}"


def plain(path: Path) -> Path:
    """The path without the ending of a compression."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def labels(key: str, sources: list[Source]) -> list[str]:
    """A name for each: its label if that is the only one. Raises LaminarError when two are the same."""
    short = [source.label for source in sources]
    labels = [source.longer_label if short.count(source.label) > 1 else source.label for source in sources]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise LaminarError(f"{key}: two of them are called '{twice}' in lines and plots; rename one")
    return labels


def parse_source(key: str, text: str) -> Source:
    """`text` is FILE, or FOLDER_OR_NAME[:SUBSET][@SPLIT]. Raises LaminarError, beginning with `key`, when it
    can be none of them."""
    path = Path(text)
    if plain(path).suffix in FILES or path.is_file():
        if not path.is_file():
            raise LaminarError(
                f"{key}={text}: {'a folder, not a file' if path.is_dir() else 'no such file'}; "
                "name a JSONL (also .gz, .zst) or Parquet file, a folder or a Hugging Face dataset"
            )
        return Source("parquet" if path.suffix == ".parquet" else "jsonl", text)
    rest, _, split = text.partition("@")
    name, _, subset = rest.partition(":")
    if name and Path(name).is_dir():
        return Source("folder", name, subset or None, split or "train")
    if _HUB_NAME.fullmatch(name) and not Path(name).parent.exists():
        return Source("hub", name, subset or None, split or "train")
    raise LaminarError(
        f"{key}={text or '(empty)'}: no such file or folder, and no name of a Hugging Face dataset "
        "(OWNER/NAME[:SUBSET][@SPLIT]); "
        "name one of them, e.g. a JSONL file with one prompt per line"
    )
