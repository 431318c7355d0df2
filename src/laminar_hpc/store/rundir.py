"""The run directory at start-up: a fresh one, or the earlier run's to go on with, or an earlier run moved
aside. Nothing is deleted."""

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import labels, parse_source
from laminar_hpc.config.yaml_text import load_yaml
from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.line.waiting import SHOW_SECONDS, who_waits
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.machine.processes import parent_process
from laminar_hpc.store import checkpoints
from laminar_hpc.store.full_disk import NO_ROOM, is_full_disk
from laminar_hpc.store.journal import FOLDER as JOURNAL
from laminar_hpc.store.recovery import identity, journal_id, mixed_up, move_aside, rename

_STORE = "store.sqlite"
_SHOWN_ROLES = 4


@dataclass(frozen=True)
class Start:
    restored_step: int | None  # of the newest checkpoint, of which the trainers see whether it is whole
    moved_to: Path | None  # where an earlier run went


def prepare(config: RunConfig, lock: RunLock | None = None) -> Start:
    """Makes `run_dir` ready, under its lock. Raises LaminarError when it cannot be made or written."""
    run_dir, moved = Path(config.run_dir), None
    try:
        own_store(config)
        begun = (run_dir / "metrics.jsonl").exists() or bool(checkpoints.present(run_dir))
        if begun and config.resume == "never":
            _refuse_if_roles_wait(run_dir)
            moved = _move_aside(run_dir, store_directory(config))
            if lock is not None:
                lock.moved(run_dir, moved)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # what users of one machine keep from others
        (run_dir / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise unusable(run_dir, error) from error
    (run_dir / ADDRESS_FILE).unlink(missing_ok=True)
    steps = checkpoints.steps(run_dir) if config.resume == "auto" else []
    return Start(steps[-1] if steps else None, moved)


def try_out(run_dir: Path) -> None:
    """For a command line. Raises Refused when `run_dir` cannot be made or written; leaves nothing behind."""
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise unusable(run_dir, error) from error
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _refuse_if_roles_wait(run_dir: Path) -> None:
    """Raises Refused when roles of the run there have outlived their controller."""
    died = (run_dir / ADDRESS_FILE).exists() and _were_apart(run_dir)  # else it has told them to leave
    if waiting := who_waits(run_dir, SHOW_SECONDS if died else 0.0):
        shown = ", ".join(waiting[:_SHOWN_ROLES]) + (" and others" if len(waiting) > _SHOWN_ROLES else "")
        text = f"{run_dir} is in use by roles of a run whose controller is gone: {shown}"
        cure = "set resume=auto to go on with them, end them first, or choose another run_dir"
        raise Refused([f"{text}; {cure}"])


def _were_apart(run_dir: Path) -> bool:
    """Whether the roles of the run there can outlive their controller."""
    try:
        config = load_yaml((run_dir / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return True
    return not isinstance(config, dict) or config.get("role") != "all"


def unusable(run_dir: Path, error: OSError) -> LaminarError:
    """The refusal of a run directory that the system call behind `error` could not use."""
    if is_full_disk(error):
        return Refused([f"{NO_ROOM} run_dir={run_dir}: make room, or choose another"])
    return Refused([f"run_dir={run_dir} cannot be used ({error.strerror}); choose another"])


def _move_aside(run_dir: Path, store: Path) -> Path:
    """Renames an earlier run, and first its store in store_dir, so that a death in between loses neither."""

    def free(number: int) -> bool:
        places = run_dir.with_name(f"{run_dir.name}.{number}"), store / f"store.{number}.sqlite"
        return not any(place.exists() for place in places)

    number = next(n for n in range(1, 100_000) if free(n))
    if store != run_dir:
        rename(store / _STORE, store / f"store.{number}.sqlite")
    return run_dir.rename(run_dir.with_name(f"{run_dir.name}.{number}"))


def own_store(config: RunConfig) -> None:
    """Raises Refused when the store in store_dir belongs to another run. One that an earlier run of this
    folder has left, whose run directory was deleted, is moved aside."""
    if not config.store_dir:
        return
    run_dir, path = Path(config.run_dir), store_path(config)
    if (run_dir / _STORE).exists():
        text = f"{run_dir / _STORE} was written without store_dir, and store_dir={config.store_dir} is set"
        raise Refused([f"{text}: move it to {path} to go on with it there"])
    found, known = identity(path), journal_id(journal_folder(config))
    if found is None or found.store_id == known:
        return
    if known:
        raise Refused([mixed_up(path, found.store_id, journal_folder(config), known)])
    mine, is_fresh = found.run_dir == str(run_dir.resolve()), not (run_dir / "metrics.jsonl").exists()
    if is_fresh and mine:
        move_aside(path)
    elif is_fresh or (found.run_dir and not mine):
        owner = f"{found.run_dir or 'another run'} (store id {found.store_id})"
        cure = "set another store_dir, or rename run_dir"
        raise Refused([f"{path} is the store of {owner}: {cure}; if that run is gone, move the file away"])


def store_directory(config: RunConfig) -> Path:
    """Where the store is: run_dir, or a folder of this run's name under store_dir."""
    run_dir = Path(config.run_dir)
    return Path(config.store_dir) / run_dir.resolve().name if config.store_dir else run_dir


def store_path(config: RunConfig) -> Path:
    """The store's file."""
    return store_directory(config) / _STORE


def journal_folder(config: RunConfig) -> Path:
    """Where the journal is of a store in store_dir."""
    return Path(config.run_dir) / JOURNAL


# ---- what earlier launches did -----------------------------------------------------------------------------


def torchrun_identity() -> str:
    """Of the agent or torchrun that started this process; goes into the metrics."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {parent_process()}"


def was_restarted(config: RunConfig) -> bool:
    """Whether torchrun itself (--max-restarts) starts the run of `run_dir` again, so that it goes on.

    The count of restarts alone does not tell: on a node where nothing failed it stays 0."""
    mine, counted = torchrun_identity(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    starts = list(jsonl.read(Path(config.run_dir) / "metrics.jsonl", "start"))
    last = starts[-1].get("torchrun", "") if starts else ""
    named = mine.split(" ")[0] not in ("", "none")
    same_name = named and last.split(" ")[0] == mine.split(" ")[0]
    return "RANK" in os.environ and (last == mine or (counted and same_name))


def cause_of_death(run_dir: Path) -> str:
    """Why the newest launch ended, as far as its controller could still say."""
    reason = "a process died, and the controller could not say which"
    for record in jsonl.read(run_dir / "metrics.jsonl", "start", "end"):
        ended = record["kind"] == "end"
        reason = str(record.get("reason", "")) if ended else "the controller died or was killed"
    return reason.removeprefix("failed: ")


def note_restart(config: RunConfig, cause: str, step: int) -> int | None:
    """Keeps a restart after step `step` in the metrics, which nobody else writes between two lives.

    Returns the step of the checkpoint to go on from, if there is one."""
    run_dir = Path(config.run_dir)
    restored = max(checkpoints.steps(run_dir), default=None)
    if (run_dir / "metrics.jsonl").exists():
        with contextlib.suppress(OSError):  # a full disk stops the next life, and that one says so
            metrics = jsonl.Appender(run_dir / "metrics.jsonl", seals=True)
            fields = {"cause": cause, "step": step, "restored_step": restored}
            metrics.write({"kind": "restart", "time": time.time(), **fields})
            metrics.close()
    return restored


def completed_step(config: RunConfig) -> int | None:
    """The step of a run that resume=auto finds complete: all steps trained and in a checkpoint that is whole,
    the last weights evaluated. None where something is left to do. Reads all of that checkpoint, of a run
    that looks complete."""
    run_dir = Path(config.run_dir)
    steps = checkpoints.steps(run_dir) if config.resume == "auto" else []
    for last in (step for step in reversed(steps) if step >= config.steps):
        if not _is_evaluated(config, last):
            return None
        if not checkpoints.damage(checkpoints.checkpoint_path(run_dir, last)):
            return last
    return None


def _is_evaluated(config: RunConfig, last: int) -> bool:
    """Whether all that is due to the weights of the last step is on record."""
    if config.source.startswith("replay:") or not config.evaluation.files:
        return True
    key = "evaluation.files"
    files = labels(key, [parse_source(key, file) for file in config.evaluation.files])
    names = ("greedy", "sampled") if config.evaluation.samples else ("greedy",)
    wanted = {(file, name) for file in files for name in names}
    done: set[tuple[str, str]] = set()
    for record in jsonl.read(Path(config.run_dir) / "metrics.jsonl", "start", "restored", "evaluation"):
        restored = record.get("restored_step")
        if record["kind"] != "evaluation" and (restored is None or restored < last):
            done.clear()  # the last steps were done again
        elif record.get("label") == "after" and record.get("step", -1) >= last:
            done.add((record.get("file", ""), record.get("name", "")))
    return wanted <= done
