"""A run as its files tell it: launches, the history of steps that led to the weights, spans, and what the
store says was consumed.

`summary` and `report` read a run through `load`; nothing here talks to a live process, so a running, crashed
or copied folder reads alike. A launch that restored step s abandons the steps > s before it: they are not in
`Run.steps`. Missing files leave their part empty; only a folder without metrics is refused.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.trace import TraceSpan, read_spans
from laminar_hpc.store.archive import files
from laminar_hpc.store.payload.layout import DamagedResponse
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import stored_trajectories
from laminar_hpc.store.run_files import config_of, metrics_of
from laminar_hpc.store.store_copy import ReadableStore, readable_store
from laminar_hpc.store.store_layout import connect_read_only, has_tables

FORECASTS = "forecasts.jsonl"  # in the run's directory: what the run foretells of itself


class Consumed(msgspec.Struct):
    """A trajectory trained on. `consumed_step` is the step of the weights that it was trained with; times are
    seconds since the epoch."""

    id: int
    group_id: int
    replica: int
    weight_id: int
    weight_step: int
    step_finished: int
    consumed_step: int
    response_length: int
    reward: float
    accuracy: float
    finish_reason: str
    reward_error: str
    time_started: float
    time_finished: float
    time_scored: float

    @property
    def staleness_generation(self) -> int:
        """Trainer steps between its weights and its last token."""
        return self.step_finished - self.weight_step

    @property
    def staleness_training(self) -> int:
        """Trainer steps between its weights and the weights that it was trained with."""
        return self.consumed_step - self.weight_step


class Totals(msgspec.Struct):
    """Sums over the trajectories that a step has trained."""

    consumed_step: int
    trajectories: int
    response_tokens: int
    reward_errors: int


@dataclass
class RunLaunch:
    """One start of the run. `reason` is "" and `end` the time of its newest line where the launch came to no
    end of its own."""

    start: float
    end: float
    restored_step: int | None
    pipeline: str | None
    derived: dict
    reason: str = ""
    steps: list[dict] = field(default_factory=list)  # of these, those that led to the weights


@dataclass
class Run:
    """Everything that is known of a run. `steps`: step records in order, each step once; `records`: the other
    kinds, all launches; `consumed`: the trajectories that were trained, but for those of which the store has
    sums alone (store/old_steps.py); `totals`: of every step in the store."""

    directory: Path
    config: dict
    launches: list[RunLaunch]
    evaluations: list[dict]
    abandoned_steps: int
    records: dict[str, list[dict]]
    spans: dict[str, list[TraceSpan]]
    consumed: list[Consumed]
    totals: list[Totals] = field(default_factory=list)
    kept_store: ReadableStore | None = None  # None: in the run's folder

    @property
    def store(self) -> Path:
        """The store, or what the journal knows of it, where another machine has it."""
        return self.kept_store.path if self.kept_store else self.directory / "store.sqlite"

    @property
    def steps(self) -> list[dict]:
        return [step for launch in self.launches for step in launch.steps]

    def over_steps(self, field: str) -> list[tuple[float, float | None]]:
        """(step, what its record has under `field`) of each step."""
        return [(step["step"], step.get(field)) for step in self.steps]

    @property
    def has_old_steps(self) -> bool:
        """Whether `consumed` lacks some of what was trained."""
        return sum(of.trajectories for of in self.totals) > len(self.consumed)

    @property
    def of_consumed(self) -> str:
        """What figures of `consumed` are of, for the user."""
        newest = f"the newest {len(self.consumed):,} " if self.has_old_steps else "the "
        return f"{newest}trajectories trained"

    def versions_max(self) -> int | None:
        """How many weight ids a trained trajectory was generated with at most, by the engine's own report;
        None where no trajectory is in the store."""
        for (policies,) in _select(self.store, "MAX(policies)", "state = 'consumed'"):
            return policies
        return None

    def wholes(self, ids: list[int]) -> list[Whole]:
        """The scored trajectories with these ids, prompt and response included, in order of the ids; without
        those of which neither payload files nor archive have a response that can be read."""
        found = list[Whole]()
        for group in self._stored(ids):
            with suppress(LaminarError):
                found += wholes(self.directory, [group], late=0.0)
        missing = set(ids) - {whole.record.trajectory_id for whole in found}
        for step in {t.consumed_step + 1 for t in self.consumed if t.id in missing}:
            with suppress(OSError, DamagedResponse):
                found += files.read(files.path_of(self.directory, step), missing)
        return sorted(found, key=lambda whole: whole.record.trajectory_id)

    def _stored(self, ids: list[int]) -> list[BatchGroup]:
        if not self.store.is_file():
            return []
        with closing(connect_read_only(self.store, 10.0)) as connection:
            return stored_trajectories(connection, ids)

    def mismatches(self, ids: list[int]) -> dict[int, tuple[float, int]]:
        """Trajectory id -> its mismatch when it was trained, as in messages.StepDone; without those of which
        none is on record."""
        rows = self._of("mismatches", "trajectory_id, mean, minibatches_ahead", ids)
        return {i: (mean, ahead) for i, mean, ahead in rows if mean is not None}

    def left_out(self, ids: list[int]) -> dict[int, str]:
        """Trajectory id -> why the divergence guard has left it out of its update."""
        return dict(self._of("left_out", "trajectory_id, why", ids))

    def group_times(self, ids: list[int]) -> dict[int, tuple[float, float]]:
        """Group id -> when it was granted and when its last trajectory was scored, seconds since the epoch; 0
        where that is not known."""
        rows = self._of("groups", "id, granted_at, finished_at", ids)
        return {group: (granted or 0.0, finished or 0.0) for group, granted, finished in rows}

    def _of(self, table: str, columns: str, ids: list[int]) -> Iterator[tuple]:
        """Rows by the first of `columns`; none where the store is of a version without such a table."""
        if any(_select(self.store, "name", f"name = '{table}'", "sqlite_master")):
            key, wanted = columns.partition(",")[0], ", ".join(map(str, ids))
            yield from _select(self.store, columns, f"{key} IN ({wanted})", table)


def load(run_dir: Path) -> Run:
    """Raises LaminarError when `run_dir` is no run."""
    run_dir = Path(run_dir)
    metrics = metrics_of(run_dir)
    launches: list[RunLaunch] = []
    evaluations: list[dict] = []
    abandoned = 0
    records: dict[str, list[dict]] = defaultdict(list)
    for record in jsonl.read(metrics):
        kind, time = record.get("kind"), record.get("time", 0.0)
        if kind == "start" or not launches:
            restored = record.get("restored_step")
            abandoned += _abandon(launches, evaluations, restored or 0)
            launches.append(
                RunLaunch(time, time, restored, record.get("pipeline"), record.get("derived") or {})
            )
        launches[-1].end = max(launches[-1].end, time)
        if kind == "restored":  # by trainers that start, with the launch or later
            abandoned += _abandon(launches, evaluations, record["restored_step"] or 0)
            if not launches[-1].steps:
                launches[-1].restored_step = record["restored_step"]
        elif kind == "step":
            launches[-1].steps.append(record)
        elif kind == "evaluation":
            evaluations.append(record)
        elif kind == "end":
            launches[-1].reason = record.get("reason", "")
        elif kind != "start":
            records[str(kind)].append(record)
    config, spans = config_of(run_dir), _spans(run_dir)
    store = readable_store(run_dir, config.get("store_dir"))
    run = Run(run_dir, config, launches, evaluations, abandoned, dict(records), spans, [], [], store)
    done = max((step["step"] for step in run.steps), default=0)
    run.consumed = _consumed(run.store, done)
    run.totals = _totals(run.store, done)
    return run


def _abandon(launches: list[RunLaunch], evaluations: list[dict], restored: int) -> int:
    """Takes back what came after step `restored`; gives how many steps that were."""
    dropped = 0
    for launch in launches:
        kept = [step for step in launch.steps if step["step"] <= restored]
        dropped += len(launch.steps) - len(kept)
        launch.steps = kept
    evaluations[:] = [evaluation for evaluation in evaluations if evaluation["step"] <= restored]
    return dropped


def _spans(run_dir: Path) -> dict[str, list[TraceSpan]]:
    """The traces, with the generation for evaluations set apart from that for training."""
    return {
        name: [
            span._replace(kind="evaluate")
            if span.kind == "generate" and span.fields.get("evaluation")
            else span
            for span in spans
        ]
        for name, spans in read_spans(run_dir).items()
    }


def _consumed(store: Path, done: int) -> list[Consumed]:
    """The trajectories that led to the weights. A batch is marked consumed before its step is done; such a
    step is not in the history, which has `done` steps."""
    where = f"state = 'consumed' AND consumed_step < {done} ORDER BY consumed_step, id"
    return [Consumed(*row) for row in _select(store, ", ".join(Consumed.__struct_fields__), where)]


def _totals(store: Path, done: int) -> list[Totals]:
    found: dict[int, Totals] = {}
    summed = "consumed_step, COUNT(*), SUM(response_length), SUM(COALESCE(reward_error, '') != '')"
    where = f"consumed_step >= 0 AND consumed_step < {done}"
    now = _select(store, summed, f"state = 'consumed' AND {where} GROUP BY consumed_step")
    old = _select(store, "consumed_step, trajectories, tokens, reward_errors", where, "old_steps")
    for step, *counts in chain(now, old):
        of = found.setdefault(step, Totals(step, 0, 0, 0))
        of.trajectories += counts[0]
        of.response_tokens += counts[1]
        of.reward_errors += counts[2]
    return [found[step] for step in sorted(found)]


def _select(path: Path, columns: str, where: str, table: str = "trajectories") -> Iterator[tuple]:
    """Rows of a table of the store at `path`, read-only; none where there is no store, or where it is just
    being made and has no tables."""
    if not path.is_file():
        return
    try:
        with closing(connect_read_only(path, 10.0)) as connection:
            if has_tables(connection, path):
                yield from connection.execute(f"SELECT {columns} FROM {table} WHERE {where}")
    except sqlite3.Error as error:
        raise LaminarError(
            f"{path} cannot be read ({error}); copy the run again, with store.sqlite-wal if there is one"
        ) from None
