"""What `laminar train` does around the job: refuse what cannot begin, start it, and start it again after a
death.

A restart goes on from the newest checkpoint. `policies/restarts.py` says when there is none; nor is there one
after an ordered stop, a refusal or a failure that would come again for sure. Each is said on the console and
noted in the metrics (kind `restart`).
"""

import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from laminar_hpc.cluster import checkpoints
from laminar_hpc.cluster.launch import GO_ON, Launch
from laminar_hpc.cluster.processes import on_stop_signals
from laminar_hpc.cluster.run_lock import refuse_if_held
from laminar_hpc.cluster.signatures import refuse_foreign
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.ending import close_completed
from laminar_hpc.controller.rundir import journal_folder, note_restart, store_directory, try_out
from laminar_hpc.controller.same_run import refuse_changes
from laminar_hpc.controller.store_check import check_store
from laminar_hpc.observability import console, jsonl
from laminar_hpc.policies.restarts import Restarts

_STORE_CHECK_SECONDS = 0.5  # a first look: the controller takes the time to read all of it


def nothing_to_start(config: RunConfig) -> bool:
    """Whether the run is complete, which is then said. Raises Refused when another run is live in its
    store's folder, when the run directory cannot be written, when the store is damaged, or when the newest
    checkpoint is not the run's own, or a setting changed that a run keeps."""
    run_dir, store = Path(config.run_dir), store_directory(config)
    refuse_if_held(store)
    try_out(run_dir)
    if close_completed(config, lambda text: print(text, flush=True)):
        return True
    if (
        config.resume == "auto" and not journal_folder(config).is_dir()
    ):  # the controller has it mend the store
        newest, replay = max(checkpoints.steps(run_dir), default=0), config.source != "rollout"
        with suppress(sqlite3.OperationalError):  # a full disk: the run itself will say so
            check_store(store / "store.sqlite", run_dir, newest, replay, _STORE_CHECK_SECONDS)
    refuse_foreign(config)
    refuse_changes(config)
    return False


def run(config: RunConfig, overrides: list[str], world_size: int) -> int:
    """Runs the job to its end. Exit code 0 when it is done or was stopped in order, 2 when it was refused,
    else 1."""
    restarts, signals, earlier = Restarts(config.restarts or 0), list[int](), newest_start(config)
    launch = Launch(config, overrides, world_size)

    def on_signal(number: int, _: object) -> None:
        signals.append(number)
        launch.on_signal(number)

    on_stop_signals(on_signal)
    while True:
        code = launch.wait()
        if code == 0:
            return 0
        step = last_step(Path(config.run_dir))
        why_not = restarts.refusal(launch.cause, step, time.time())
        if signals or launch.is_permanent or why_not:
            launch.print_error(
                f"; not started again: {why_not}" if why_not and config.restarts and not signals else ""
            )
            return code
        cause = launch.cause.removesuffix(GO_ON)
        restored = note_restart(config, cause, step)
        origin = f"from the checkpoint of step {restored}" if restored is not None else "from the beginning"
        count = f"{len(restarts.times)} of {config.restarts} within an hour"
        print(console.line("restart", f"{count}, {origin}: {cause}"), flush=True)
        # else there is only an earlier run, which this job was to move aside
        resume = ["resume=auto"] if newest_start(config) not in ({}, earlier) else []
        launch = Launch(config, [*overrides, *resume], world_size)
        if signals:  # it came between two lives
            launch.end()


def newest_start(config: RunConfig) -> dict:
    """The record of the newest launch in run_dir; empty where there was none."""
    return [{}, *jsonl.read(Path(config.run_dir) / "metrics.jsonl", "start")][-1]


def last_step(run_dir: Path) -> int:
    """The newest step done; 0 before the first."""
    return next((r["step"] for r in reversed(list(jsonl.read(run_dir / "metrics.jsonl", "step")))), 0)
