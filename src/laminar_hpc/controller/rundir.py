"""The run directory at start-up: a fresh one, or the earlier run's to go on with, or an earlier run moved aside. Nothing is deleted."""

from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.cluster.address import ADDRESS_FILE
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.weights import checkpoints


@dataclass(frozen=True)
class Start:
    restored_step: int  # -1 = a fresh run
    moved_to: Path | None  # where an earlier run went


def prepare(config: RunConfig) -> Start:
    """Makes `run_dir` ready. Raises LaminarError when it cannot be made or written."""
    run_dir = Path(config.run_dir)
    moved = None
    try:
        if (run_dir / "metrics.jsonl").exists() and config.resume == "never":
            number = next(n for n in range(1, 100_000) if not run_dir.with_name(f"{run_dir.name}.{n}").exists())
            moved = run_dir.with_name(f"{run_dir.name}.{number}")
            run_dir.rename(moved)
            store = store_directory(config) / "store.sqlite"
            if store.exists():  # with store_dir it is not in the folder that was moved
                store.rename(store.with_name(f"store.{number}.sqlite"))
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaminarError(f"run_dir={run_dir} cannot be used ({error.strerror}); choose another") from None
    (run_dir / ADDRESS_FILE).unlink(missing_ok=True)
    found = checkpoints.steps(run_dir) if config.resume == "auto" else []
    return Start(found[-1] if found else -1, moved)


def store_directory(config: RunConfig) -> Path:
    """Where the store is: run_dir, or a folder of this run's name under store_dir."""
    run_dir = Path(config.run_dir)
    return Path(config.store_dir) / run_dir.resolve().name if config.store_dir else run_dir
