"""`laminar init DIR`: a small project of one's own that runs as it is: data, reward, experiment, model, and a
script for Slurm.

The files lie in template/ as they will lie in DIR; beside them go the base model of the shipped example and
the script for one Slurm allocation. DIR appears whole or not at all: it is written beside its place and
renamed. Nothing is overwritten.
"""

import os
import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from laminar_hpc.config.directories import shipped_directory
from laminar_hpc.config.errors import LaminarError

TEMPLATE = Path(__file__).parent / "template"
_ENVIRONMENT = "@ENVIRONMENT@"  # in template/train.sbatch: the environment that runs `laminar init`


def main(options: Namespace) -> int:
    """`laminar init FOLDER`: makes the project and prints what to do next. Returns the exit code."""
    target = Path(options.words[0])
    make(target)
    print(f"{target} is ready: data/, rewards.py, conf/experiment/mine.yaml, model/, train.sbatch, README.md")
    print(f"  cd {target}")
    print("  laminar train --config-dir conf experiment=mine    # about a minute on two cores")
    return 0


def make(target: Path) -> None:
    """Raises LaminarError when the folder is there and not empty, or cannot be written."""
    target = target.absolute()
    if target.resolve() == Path.cwd().resolve():
        raise LaminarError(f"laminar init {target}: this is the current folder; name a new one")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LaminarError(f"laminar init {target}: it exists and is not an empty folder; name a new one")
    beside: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        _write(beside)
        beside.rename(target)  # over an empty folder too, but never over a full one
    except OSError as error:
        raise LaminarError(
            f"laminar init {target}: it cannot be written ({error.strerror}); name another folder"
        ) from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _write(folder: Path) -> None:
    shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(shipped_directory("examples") / "arithmetic" / "base", folder / "model")
    for name in ("laminar_single.sbatch", "common.sh", "site.sh"):
        shutil.copy(shipped_directory("slurm") / name, folder)
    script = folder / "train.sbatch"
    script.write_text(script.read_text().replace(_ENVIRONMENT, sys.prefix))
    mask = os.umask(0)
    os.umask(mask)
    for path in (
        folder,
        *folder.rglob("*"),
    ):  # mkdtemp's own is closed to others, an installed file may be read-only
        executable = path.is_dir() or path.suffix == ".sbatch"
        path.chmod((0o777 if executable else 0o666) & ~mask)
