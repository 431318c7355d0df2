"""`laminar_hpc.Run`: a run from Python, in a notebook or a script.

    import laminar_hpc

    run = laminar_hpc.Run("experiment=demo", "steps=20")     # the words of `laminar train`; it begins at once
    for step in run:                                         # the line of each step, as it is done
        print(step["step"], step["reward_mean"])
    run.wait()                                               # its figures, as in summary.json
    run.steps().reward_mean.plot()                           # pandas

The run is a process of its own (launch/python_child.py). An interrupted cell leaves it alone; it ends in
order, with a checkpoint, when this process does.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from laminar_hpc.config.errors import LaminarError, Refused, said
from laminar_hpc.launch.python_child import TrainProcess
from laminar_hpc.machine.locks.run_lock import refuse_if_held
from laminar_hpc.report.live import RunFollower
from laminar_hpc.store.run_files import metrics_of

if TYPE_CHECKING:
    import pandas

_LOOK_SECONDS = 0.2  # between two looks at the run's files
_DEAD_SECONDS = 60.0  # longer than a supervisor or a spare controller takes to start it again
_NOT_SHOWN = ("kind", "seal")  # of a step's line


class LaminarRun:
    """One run. `run_dir`: its folder."""

    def __init__(self, *words: str) -> None:
        """Starts what `laminar train WORDS` would. Raises LaminarError for words that no run begins with, one
        line for each mistake; what is refused later is raised by whatever waits for the run."""
        from laminar_hpc.config.load import load_config
        from laminar_hpc.launch.cli import COMMANDS

        options = COMMANDS["train"].parse("train", [*map(str, words)])
        if options.multirun or options.cfg or options.info:
            raise Refused(
                ["laminar_hpc.Run starts one run: leave --multirun, --cfg and --info to the command"]
            )
        config = load_config(options.words)
        self.run_dir = Path(config.run_dir).absolute()
        self._is_dry = config.dry_run
        self._begun = time.time()
        self._process: TrainProcess | None = TrainProcess([*options.words, f"run_dir={self.run_dir}"])

    @classmethod
    def open(cls, run_dir: str | Path) -> "LaminarRun":
        """A run that somebody has started, from its folder; it may go on, have ended or have died. Raises
        LaminarError where there is none."""
        metrics_of(Path(run_dir))
        run = cls.__new__(cls)
        run.run_dir = Path(run_dir).absolute()
        run._is_dry = False
        run._begun = 0.0
        run._process = None
        return run

    def __repr__(self) -> str:
        return f"<laminar_hpc.Run {self.run_dir}: {self.state}>"

    @property
    def state(self) -> str:
        """starting, going on, ended or died, as `laminar top` says it."""
        if self._process is not None and self._process.code is not None:
            return "died" if self._process.code else "ended"
        try:
            return RunFollower(self.run_dir).look(traces=False).state
        except LaminarError:
            return "starting"

    @property
    def output(self) -> str:
        """What the command has printed, at most its last 10,000 lines; empty for a run that was opened."""
        return self._process.output if self._process is not None else ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The line of each step (docs/metrics.md, "A step"), from the first of this launch, or of an opened
        run from its first one: those that are done, then each as it is done, until the run ends. A step that
        is done again after a restore comes again. Raises LaminarError, with the line that the command prints,
        if the run fails."""
        heard: list[dict[str, Any]] = []
        follower, launched = None, not self._begun
        while True:
            has_ended = self._has_ended(follower)
            follower = follower or self._follower(heard)
            if follower is not None:
                follower.look(traces=False)
            for record in heard:
                # an earlier run may lie there until this one has moved it aside
                launched = launched or (record["kind"] == "start" and record["time"] >= self._begun)
                if launched and record["kind"] == "step":
                    yield {name: value for name, value in record.items() if name not in _NOT_SHOWN}
            heard.clear()
            if has_ended:
                return self._raise_if_failed(follower)
            time.sleep(_LOOK_SECONDS)

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Returns the figures of summary.json when the run has ended, in order or early; none of a dry run,
        whose folder may hold an earlier one. Raises LaminarError if it fails, TimeoutError after `timeout`
        seconds."""
        follower, deadline = None, time.monotonic() + timeout if timeout is not None else None
        while not self._has_ended(follower):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_dir} has not ended within {timeout:g} s")
            follower = follower or (None if self._process else self._follower([]))
            if follower is not None:
                follower.look(traces=False)
            time.sleep(_LOOK_SECONDS)
        self._raise_if_failed(follower)
        summary = self.run_dir / "summary.json"
        return json.loads(summary.read_text()) if summary.is_file() and not self._is_dry else {}

    def stop(self, timeout: float | None = None) -> dict[str, Any]:
        """Has the run finish its step, write a checkpoint and leave, then waits as `wait` does. Raises
        LaminarError for an opened run that has no controller."""
        if self._process is not None:
            self._process.stop()
        elif self.state in ("going on", "starting"):
            from laminar_hpc.line.stop import request_stop

            request_stop(self.run_dir, "laminar_hpc.Run.stop")
        return self.wait(timeout)

    def steps(self) -> "pandas.DataFrame":
        """A row for each step that led to the newest weights, by its number; the columns are those of
        docs/metrics.md. Works at any time. Raises LaminarError without pandas."""
        table = _pandas("steps()")
        found = RunFollower(self.run_dir, recent=None).look(traces=False).steps
        rows = [{name: value for name, value in step.items() if name not in _NOT_SHOWN} for step in found]
        return table.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    def trajectories(self, first: int = 1, last: int | None = None) -> "pandas.DataFrame":
        """A row for each scored trajectory that the steps `first` to `last` have trained, and, with `last`
        None, for those that no step has trained yet; the columns are those of `laminar export`
        (docs/data.md). Raises LaminarError without pandas, or where the store cannot be read."""
        table = _pandas("trajectories()")
        from laminar_hpc.report.export.batches import batches

        found = [batch.to_pandas() for batch in batches(self.run_dir, first, last)]
        return table.concat(found, ignore_index=True) if found else table.DataFrame()

    # ---- how it ends ---------------------------------------------------------------------------------------

    def _follower(self, heard: list[dict[str, Any]]) -> RunFollower | None:
        """None while the run has no files yet."""
        try:
            return RunFollower(self.run_dir, heard.append)
        except LaminarError:
            return None

    def _has_ended(self, follower: RunFollower | None) -> bool:
        """By its process, or else by its files as they were at the last look. Whoever holds the folder still
        writes there; one that is silent may be about to be started again."""
        if self._process is not None:
            return self._process.code is not None
        if follower is None or follower.view.state not in ("ended", "died"):
            return False
        silent = time.time() - follower.view.last_sign
        may_come_back = follower.view.state == "died" and silent < _DEAD_SECONDS
        return not may_come_back and not said(refuse_if_held, self.run_dir)

    def _raise_if_failed(self, follower: RunFollower | None) -> None:
        if self._process is not None:
            self._process.raise_if_failed()
        elif follower is not None and follower.view.state == "died":
            raise LaminarError(f"{self.run_dir} died: no end was recorded; resume=auto resumes it")
        elif follower is not None and follower.view.reason.startswith("failed"):
            raise LaminarError(follower.view.reason.removeprefix("failed: "))


def _pandas(what: str) -> ModuleType:
    try:
        import pandas  # takes half a second, and nothing else needs it
    except ImportError:
        raise LaminarError(
            f"Run.{what} gives a pandas DataFrame, and pandas is not installed here: pip install pandas, or "
            "read the run's metrics.jsonl and what laminar export writes"
        ) from None
    return pandas
