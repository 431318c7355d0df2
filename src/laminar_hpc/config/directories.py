"""The folders that laminar ships beside its code: configurations, examples and job scripts."""

from pathlib import Path

_SOURCE_TREE = Path(__file__).resolve().parents[3]


def shipped_directory(name: str) -> Path:
    """`conf`, `examples` or `slurm` of the source tree, or the copy inside an installed wheel."""
    from_source = (_SOURCE_TREE / "conf" / "config.yaml").exists()
    return (_SOURCE_TREE if from_source else Path(__file__).resolve().parents[1]) / name


def conf_directory() -> Path:
    return shipped_directory("conf")


def examples_directory(path: str) -> str:
    """Resolves `${examples:...}`."""
    return str(shipped_directory("examples") / path)
