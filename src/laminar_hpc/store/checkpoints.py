"""Where checkpoints lie, which ones there are and whether they are whole:
run_dir/checkpoints/step_000020/{hf/, megatron/, rng/, files.json, signature.json, state.json}.

Used by the trainer, which writes and loads them, and by the controller; imports no torch. A checkpoint is
written under a name that begins with a dot and renamed when all of it is on the disk. `files.json` lists
every other file with its length and SHA-256, so that damage is found before anything is loaded, and
`signature.json` says whose list it is (store/signatures.py).

    .step_000020.3          being written by trainer generation 3, or left by one that died
    .old_step_000020        replaced by another checkpoint of that step
    .doomed_step_000020     being deleted
    .damaged_step_000020    passed over by a trainer; stays until somebody deletes it
    trainer generation                    the number of the trainer generation that may write here
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.files.durable import FileSum

_NAME = re.compile(r"step_(\d{6,})")
STATE_FILE = "state.json"
LIST_FILE = "files.json"
SIGNATURE_FILE = "signature.json"
_FENCE_FILE = "gang"
_STATE_KEYS = ("step", "state_hash", "skipped_in_a_row", "distributed_optimizer")


class DamagedCheckpoint(Exception):
    """A checkpoint is not what was written; the text says which of its files, and what is wrong with it."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, whether it exists or not."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def going_on_from(checkpoint: Path) -> str:
    """The word of a command line with which another run begins with its weights, or with its adapter."""
    folder = checkpoint / "hf"
    key = "model.lora.path" if (folder / ADAPTER_CONFIG_FILE).is_file() else "model.path"
    return f"{key}={folder}"


def present(run_dir: Path) -> list[int]:
    """Steps of all checkpoints that have their name, whole or damaged, ascending."""
    folder = Path(run_dir) / "checkpoints"
    names = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    return sorted(int(m[1]) for m in map(_NAME.fullmatch, names) if m)


def steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that look complete, ascending: trainers look closer before they load."""
    return [step for step in present(run_dir) if (checkpoint_path(run_dir, step) / STATE_FILE).is_file()]


# ---- whether they are whole --------------------------------------------------------------------------------


def read_state(checkpoint: Path) -> dict:
    """state.json: step, state_hash, the trainer's layout, skipped_in_a_row, and where it comes from:
    store_id, restore_epoch, trainer generation. Raises Damaged."""
    state = _read_json(checkpoint, STATE_FILE)
    missing = [key for key in _STATE_KEYS if key not in state]
    if missing:
        raise DamagedCheckpoint(f"{STATE_FILE} has no {missing[0]}")
    return state


def store_id(checkpoint: Path) -> str:
    """Of the store that knows what it was trained on; "" where it does not say or cannot be read."""
    try:
        return str(_read_json(checkpoint, STATE_FILE).get("store_id", ""))
    except DamagedCheckpoint:
        return ""


def damage(checkpoint: Path, share: int = 0, of: int = 1) -> str:
    """What is wrong with share number `share` of `of` shares of its files, as "FILE is missing"; "" if
    nothing. A checkpoint of a version that made no list counts as whole."""
    try:
        state = read_state(checkpoint)
        if not is_listed(checkpoint) and "files" not in state:
            return ""
        files = _listed(checkpoint)
    except DamagedCheckpoint as error:
        return str(error)
    if f"step_{state['step']:06d}" != checkpoint.name:
        return f"{STATE_FILE} is that of step {state['step']}"
    largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
    for name in largest_first[share::of]:
        if wrong := durable.difference(checkpoint / name, files[name]):
            return f"{name} {wrong}"
    for path in (checkpoint / "megatron").glob("*") if share == 0 else ():
        if f"megatron/{path.name}" not in files:  # Megatron would read it
            return f"megatron/{path.name} is not in {LIST_FILE}"
    if STATE_FILE not in files or len(files) != state.get("files", 0) + 1:
        return f"{LIST_FILE} has {len(files)} names, not {STATE_FILE} and {state.get('files', 0)} more"
    return ""


def is_listed(checkpoint: Path) -> bool:
    """Whether `damage` can tell of every file; not of a checkpoint of a version that made no list."""
    return (checkpoint / LIST_FILE).exists()


def _listed(checkpoint: Path) -> dict[str, FileSum]:
    listed = _read_json(checkpoint, LIST_FILE)
    try:
        return {name: FileSum(int(size), str(digest)) for name, (size, digest) in listed.items()}
    except (TypeError, ValueError):
        raise DamagedCheckpoint(f"{LIST_FILE} is no list of files") from None


def _read_json(checkpoint: Path, name: str) -> dict:
    try:
        content = json.loads((checkpoint / name).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{name} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{name} is no table")
    return content


# ---- writing them ------------------------------------------------------------------------------------------


def publish(
    partial: Path,
    target: Path,
    state: dict,
    files: dict[str, FileSum],
    sign: Callable[[bytes], bytes],
    check: Callable[[Path], None],
) -> None:
    """Gives a written checkpoint its name. `files`: all that is in `partial`, sealed by who wrote it.
    `sign(content of files.json)` gives that of signature.json. Every byte and every name is on the disk
    before the rename, and the rename itself when this returns. `check(target)` is called right before; where
    it raises, nothing gets a name."""
    text = (json.dumps({**state, "files": len(files)}, indent=2) + "\n").encode()
    listed = json.dumps({**files, STATE_FILE: durable.sum_of(text)}).encode()
    durable.write(partial / LIST_FILE, listed)
    durable.write(partial / SIGNATURE_FILE, sign(listed))
    durable.write(partial / STATE_FILE, text)
    for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        durable.sync_folder(folder)
    check(target)
    if target.exists():  # of an earlier launch that went on from an older checkpoint
        target.rename(target.with_name(f".old_{target.name}"))
    partial.rename(target)
    durable.sync_folder(target.parent)
    durable.sync_folder(target.parent.parent)


def mend(run_dir: Path) -> None:
    """A writer that died between the two renames of `publish` left a checkpoint unnamed: names it again."""
    folder = Path(run_dir) / "checkpoints"
    for old in folder.glob(".old_step_*"):
        target = folder / old.name.removeprefix(".old_")
        if not target.exists():
            old.rename(target)
            durable.sync_folder(folder)


def set_aside(checkpoint: Path) -> Path:
    """A damaged one, under another name, which it returns."""
    kept, number = checkpoint.with_name(f".damaged_{checkpoint.name}"), 1
    while kept.exists():
        number += 1
        kept = checkpoint.with_name(f".damaged_{checkpoint.name}.{number}")
    checkpoint.rename(kept)
    durable.sync_folder(kept.parent)
    return kept


def prune(run_dir: Path, newest: int, keep: int, keep_every: int = 0) -> None:
    """Deletes all checkpoints but that of step `newest`, which has just been written, the `keep` last ones
    and those of the multiples of `keep_every`; and whatever an interrupted writer has left. One that is being
    read stays until the next time. Renamed first, so none is seen half-deleted."""
    folder = Path(run_dir) / "checkpoints"
    for step in present(run_dir)[:-keep]:
        if step == newest or (keep_every and step % keep_every == 0):
            continue
        doomed = checkpoint_path(run_dir, step)
        with _lock(doomed, fcntl.LOCK_EX) as nobody_reads:
            if nobody_reads:
                doomed.rename(folder / f".doomed_{doomed.name}")
    for left in [path for kind in ("", "old_", "doomed_") for path in folder.glob(f".{kind}step_*")]:
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Inside, `prune` leaves the checkpoint alone."""
    with _lock(checkpoint, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _lock(checkpoint: Path, kind: int) -> Iterator[bool]:
    """Whether nobody holds a lock that speaks against it. True also where the file system has no locks."""
    number = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        free = True
        try:
            fcntl.flock(number, kind | fcntl.LOCK_NB)
        except OSError as error:
            free = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        yield free
    finally:
        os.close(number)


# ---- who may write -----------------------------------------------------------------------------------------


def fence(run_dir: Path, trainer_generation: int) -> None:
    """From here on only trainer generation number `trainer_generation` may give a checkpoint its name. Called
    by the controller before it lets the trainer generation in."""
    folder = Path(run_dir) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    durable.replace(folder / _FENCE_FILE, f"{trainer_generation}\n".encode())


def newest_trainer_generation(run_dir: Path) -> int:
    """The trainer generation that may write; 0 where no controller has said so."""
    try:
        return int((Path(run_dir) / "checkpoints" / _FENCE_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return 0
