"""What `laminar train` does around the job: refuse what cannot begin, start it, and start it again after a
death.

A restart goes on from the newest checkpoint. `policies/restarts.py` says when there is none; nor is there one
after an ordered stop, a refusal or a failure that would come again for sure. Each is said on the console and
noted in the metrics (kind `restart`).
"""

import sqlite3
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.check import derive
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.launch import NodeAgent, WorkerGroup
from laminar_hpc.launch.ranks import Ranks
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.locks.run_lock import refuse_if_held
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.processes import on_stop_signals
from laminar_hpc.machine.roles import assign_roles
from laminar_hpc.policies.restarts import Restarts
from laminar_hpc.report.ending import close_completed
from laminar_hpc.store import checkpoints
from laminar_hpc.store.rundir import journal_folder, note_restart, store_directory, try_out
from laminar_hpc.store.same_run import refuse_changes
from laminar_hpc.store.signatures import refuse_foreign
from laminar_hpc.store.store_check import check_store

GO_ON = ", then go on with the same command and resume=auto"
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


class WholeRun(WorkerGroup):
    """All ranks of a run on this machine. A restart goes on with the run unless only an earlier one is there,
    which this one was to move aside."""

    def __init__(self, config: RunConfig, words: list[str], world: int) -> None:
        self._world = world
        self._earlier = newest_start(config)
        restarts = Restarts(config.restarts or 0)
        super().__init__(config, words, Ranks(range(world), world), restarts, advice=GO_ON)

    def name(self, rank: int) -> str:
        derived, lanes = derive(self.config), self.config.relay.lanes
        mine = assign_roles(derived.trainer_ranks, derived.rollout_ranks, 1, self._world, lanes)[rank]
        return f"{mine.role} {mine.index}"

    def again(self, cause: str, step: int) -> list[str]:
        restored = note_restart(self.config, cause, step)
        origin = f"from the checkpoint of step {restored}" if restored is not None else "from the beginning"
        count = f"{len(self.restarts.times)} of {self.config.restarts} within an hour"
        print(console.line("restart", f"{count}, {origin}: {cause}"), flush=True)
        return ["resume=auto"] if newest_start(self.config) not in ({}, self._earlier) else []


def run(config: RunConfig, words: list[str], world: int) -> int:
    """Runs the job to its end. Exit code 0 when it is done or stopped in order, 2 when refused, else 1."""
    agent = NodeAgent(Path(config.run_dir), [WholeRun(config, words, world)])
    on_stop_signals(agent.on_signal)
    return agent.run()


def newest_start(config: RunConfig) -> dict:
    """The record of the newest launch in run_dir; empty where there was none."""
    return [{}, *jsonl.read(Path(config.run_dir) / "metrics.jsonl", "start")][-1]
