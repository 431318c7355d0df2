"""`--config-dir DIR` anywhere among the words of a command line, and options that hold several."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.config.errors import LaminarError

_CONFIG_DIR = "write --config-dir DIR, where DIR holds experiment/NAME.yaml"


def take_config_dir(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Splits `--config-dir DIR` or `--config-dir=DIR` from the overrides. DIR is made absolute.

    Raises LaminarError when DIR is missing, given twice, or holds no configuration group.
    """
    given: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            given.append(value if equals else next(left, ""))
        else:
            rest.append(word)
    if not given:
        return None, rest
    if len(given) > 1 or not given[0]:
        wrong = f"one folder, not {len(given)}" if given[0] else "no folder given"
        raise LaminarError(f"--config-dir: {wrong}; {_CONFIG_DIR}")
    directory = Path(given[0]).expanduser().absolute()
    if not directory.is_dir():
        raise LaminarError(f"--config-dir={given[0]}: no such folder; {_CONFIG_DIR}")
    if not any(directory.glob("*/*.yaml")):
        loose = next(iter(sorted(directory.glob("*.yaml"))), None)
        cure = f"move {loose.name} to {directory / 'experiment' / loose.name}" if loose else _CONFIG_DIR
        raise LaminarError(f"--config-dir={given[0]}: no group of configurations in it; {cure}")
    return directory, rest


def with_absolute_config_dir(words: Sequence[str]) -> list[str]:
    """The same words for a process that may have another working directory."""
    directory, rest = take_config_dir(words)
    return rest if directory is None else [f"--config-dir={directory}", *rest]


def split(flag: str, values: Sequence[str]) -> list[str]:
    """Options of sbatch or ssh, as a shell would read them."""
    found = list[str]()
    for value in values:
        try:
            found += shlex.split(value)
        except ValueError as error:
            raise LaminarError(f"{flag}={value}: {error}; quote it as in a shell") from None
    return found
