"""`laminar logs RUN_DIR [NAME]`: the end of a process's log. It is in RUN_DIR/logs, or on a machine that has
joined the run and shares no folder with it: then it is asked for over the run's bulk door.
"""

import os
import re
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.bulk_client import BulkClient
from laminar_hpc.line.join_key import JOIN_FILE, read_join_key
from laminar_hpc.line.messages.bulk import LOG_BYTES_MAX, PROCESS, AskLog
from laminar_hpc.machine.observability import console
from laminar_hpc.store import status

_ASK_SECONDS = 10.0


def main(options: Namespace) -> int:
    """The exit code. Raises LaminarError for what is no run, and for a log that is not to be had."""
    run_dir, names = Path(options.words[0]), options.words[1:]
    folder, lines = run_dir / "logs", _count(options.lines)
    here = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not here:
        raise LaminarError(f"{run_dir} is no run directory, or its run has written no log yet")
    if len(names) > 1 or any(name.startswith("-") for name in names):
        raise LaminarError(f"{names[-1]}: laminar logs takes a run and the name of one log")
    if not names:
        print("\n".join(listing(run_dir, here)))
        return 0
    wanted = names[0] if names[0] in here else names[0].replace("-", "").replace(" ", "")
    if wanted in here:
        text = _end_of(here[wanted])
    elif re.search(PROCESS, wanted) and (run_dir / JOIN_FILE).exists():
        text = fetched(run_dir, wanted)
    else:
        raise LaminarError(f"there is no log of {names[0]} in {folder}: {', '.join(here)}")
    print("\n".join(text.decode(errors="backslashreplace").splitlines()[-lines:]))
    return 0


def fetched(run_dir: Path, process: str) -> bytes:
    """The end of the log of a process on a machine that has joined. Raises LaminarError where it is gone."""
    with closing(BulkClient(read_join_key(run_dir / JOIN_FILE), _ASK_SECONDS)) as client:
        return client.ask(AskLog(process, LOG_BYTES_MAX))[1]


def listing(run_dir: Path, here: dict[str, Path]) -> list[str]:
    """A line for each log: its name, and its size or the machine where it is."""
    rows = {name: console.size(path.stat().st_size) for name, path in here.items()}
    shown = status.read(run_dir) if (run_dir / JOIN_FILE).exists() else None
    for rank in shown.ranks if shown is not None else []:
        rows.setdefault(f"{rank.role}{rank.index}", f"on {rank.machine}")
    return [f"{name:<16} {where}" for name, where in rows.items()]


def _end_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES_MAX))
        return file.read(LOG_BYTES_MAX)


def _count(given: str) -> int:
    if not given.isdecimal() or not 0 < int(given) <= LOG_BYTES_MAX:
        raise LaminarError(f"--lines={given}: write a number from 1 on")
    return int(given)
