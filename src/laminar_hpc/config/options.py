"""The options of `laminar train`, in either spelling and anywhere among the words: Hydra's own flags, and
--slurm. Whatever is no option here stays a word for config/words.py. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, did_you_mean

CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_MULTIRUN = ("--multirun", "-m")
_CONFIG_DIR = "write --config-dir DIR, where DIR holds experiment/NAME.yaml"


@dataclass(frozen=True)
class Options:
    """What is asked for besides a plain start. `slurm` holds options of sbatch."""

    cfg: str | None = None
    info: str | None = None
    multirun: bool = False
    slurm: str | None = None


def take_options(words: Sequence[str]) -> tuple[Options, list[str]]:
    """Splits the options but --config-dir from the words. Raises LaminarError for values they do not have."""
    cfg, rest = _take_choice(words, ("--cfg", "-c"), CFG, None)
    info, rest = _take_choice(rest, ("--info", "-i"), INFO, "all")
    slurm = next((word.partition("=")[2] for word in rest if word.partition("=")[0] == "--slurm"), None)
    multirun = any(word in _MULTIRUN for word in rest)
    rest = [word for word in rest if word not in _MULTIRUN and word.partition("=")[0] != "--slurm"]
    if slurm is not None and not multirun:
        raise LaminarError(
            "--slurm submits the jobs of --multirun: add it; or submit one run with "
            "`sbatch slurm/laminar_single.sbatch key=value ...`"
        )
    return Options(cfg, info, multirun, slurm), rest


def _take_choice(
    words: Sequence[str], flags: tuple[str, str], choices: tuple[str, ...], default: str | None
) -> tuple[str | None, list[str]]:
    """The value of an option, None where it is not given. Its value may be left out where it has a
    default."""
    value, rest, left = None, list[str](), list(words)
    while left:
        word = left.pop(0)
        flag, equals, value_here = word.partition("=")
        if flag not in flags:
            rest.append(word)
            continue
        if not equals and left and (left[0] in choices or default is None):
            value_here = left.pop(0)
        value = value_here or default or ""
        if value not in choices:
            wrong = f"{flags[0]}={value}" if value else flags[0]
            raise LaminarError(f"{wrong}: use one of {', '.join(choices)}{did_you_mean(value, choices)}")
    return value, rest


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
