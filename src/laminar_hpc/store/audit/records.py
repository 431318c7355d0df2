"""What the records of a run say: metrics.jsonl, the checkpoints and one snapshot of the store."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import ResponsePlace, ScorePart, Trajectory
from laminar_hpc.line.messages.wire import decode_score
from laminar_hpc.machine.files import jsonl
from laminar_hpc.store.checkpoints import checkpoint_path, steps
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.store.payload.reader import read as read_payloads
from laminar_hpc.store.run_files import config_of, metrics_of
from laminar_hpc.store.seals import ALL_SEALED, ARCHIVE, PROMPTS, seal_of
from laminar_hpc.store.store_copy import readable_store
from laminar_hpc.store.store_layout import connect_read_only, has_tables

_AT_ONCE = 256  # responses that are read together
Row = TypeVar("Row", bound=msgspec.Struct)


class GroupRow(msgspec.Struct):
    """A row of the store's table `groups`."""

    id: int
    state: str
    weight_step: int
    finish_order: int | None
    consumed_step: int | None
    reason: str | None


class TrajectoryRow(msgspec.Struct):
    """A row of `trajectories`, and whether it has a score and a response."""

    id: int
    group_id: int
    sample_index: int
    attempt: int
    state: str
    weight_id: int
    weight_step: int
    consumed_step: int | None
    response_length: int | None
    digest: str | None
    scored: int
    stored: int  # its response is there
    replica: int | None
    step_finished: int | None
    reward: float | None
    accuracy: float | None
    finish_reason: str | None
    reward_error: str | None
    time_started: float | None
    time_finished: float | None
    time_scored: float | None
    trained: int | None
    policies: int | None
    moves: int | None
    score: bytes | None

    def parts(self) -> ScorePart | None:
        """Returns the score; None if there is none that can be read."""
        try:
            return decode_score(self.score) if self.score else None
        except msgspec.DecodeError:
            return None

    def record(self) -> Trajectory | None:
        """Returns the trajectory as the archive has it; None without a score."""
        score = self.parts()
        if score is None:
            return None
        known: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        of_score = (score.time_scored, score.reward, score.reward_parts, score.reward_error)
        names: dict[str, Any] = dict(zip(ScorePart.__struct_fields__, of_score, strict=True))
        return Trajectory(trajectory_id=self.id, length=self.response_length or 0, **known, **names)


_SAME = {*Trajectory.__struct_fields__} & {*TrajectoryRow.__struct_fields__} - {*ScorePart.__struct_fields__}


class OldStep(msgspec.Struct):
    """A row of `old_steps`: sums over trajectories that have no row any more."""

    consumed_step: int
    trajectories: int
    tokens: int
    id_sum: int
    digest_sum: str


class WeightsRow(msgspec.Struct):
    """A row of `weights`."""

    id: int
    restore_epoch: int
    step: int


@dataclass
class TrainerLaunch:
    """A start of the trainers from a checkpoint (`restored`, 0: none), and the steps that it reported."""

    restored: int
    trajectories_per_step: int | None
    derived: dict  # as its line in metrics.jsonl has it; of an older version empty
    refresh: str | None  # pipeline.refresh
    steps: list[dict] = field(default_factory=list)


@dataclass
class StoreRecords:
    """One snapshot of the store; responses are read when asked for."""

    meta: dict[str, str]
    weights: list[WeightsRow]
    groups: dict[int, GroupRow]
    trajectories: list[TrajectoryRow]
    old_steps: dict[int, OldStep]  # store/old_steps.py
    connection: sqlite3.Connection
    run_dir: Path  # where its payload files are
    store_dir: str | None  # as the configuration has it
    seals: dict[tuple[str, int], int | str]  # of prompts and of the archive's files

    def responses(self) -> Iterator[tuple[int, Response | str | None]]:
        """(trajectory id, its response, or why it cannot be read); None where a live run has archived it."""
        unread: dict[int, str] = {}
        rows = self.connection.execute(
            "SELECT trajectory_id, file, offset, size FROM responses ORDER BY file, offset"
        )
        while some := [(i, ResponsePlace(*place)) for i, *place in rows.fetchmany(_AT_ONCE)]:
            for (i, _), found in zip(some, self._read(some), strict=True):
                if isinstance(found, str):
                    unread[i] = found
                else:
                    yield i, found
        there = self._have_places() if unread else set()
        yield from ((i, why if i in there else None) for i, why in unread.items())

    def archive_seal(self, step: int) -> str:
        """The SHA-256 of the archive's file of a step, from 1; "" where none is known."""
        return str(self.seals.get((ARCHIVE, step), ""))

    def is_sealed_prompt(self, group_id: int, tokens: bytes) -> bool:
        """Whether a group had this prompt; True also where an earlier version noted nothing of it."""
        known = self.seals.get((PROMPTS, group_id))
        return known == seal_of((group_id, tokens)) or (known is None and ALL_SEALED not in self.meta)

    def _read(self, some: list[tuple[int, ResponsePlace]]) -> Sequence[Response | str]:
        try:
            return read_payloads(self.run_dir, some, late=0.0)
        except LaminarError as error:
            if len(some) == 1:
                return [str(error)]
            return [found for one in some for found in self._read([one])]

    def _have_places(self) -> set[int]:
        """The trajectories whose responses are not archived, by the store of this moment."""
        store = readable_store(self.run_dir, self.store_dir)  # where the first one was a copy, another
        with contextlib.closing(connect_read_only(store.path, 10.0)) as now:
            return {i for (i,) in now.execute("SELECT trajectory_id FROM responses")}


@dataclass
class Records:
    """`damage`: why there is no store. `events`: the other kinds of metrics.jsonl."""

    run_dir: Path
    config: dict
    launches: list[TrainerLaunch]
    events: dict[str, list[dict]]
    checkpoints: dict[int, dict | None]  # step -> its state.json
    store: StoreRecords | None
    damage: str = ""

    @property
    def all_sealed(self) -> bool:
        """Whether all that can have a seal has had one from the beginning."""
        return self.store is not None and ALL_SEALED in self.store.meta

    @property
    def is_replay(self) -> bool:
        return str(self.config.get("source", "")).startswith("replay:")

    def history(self) -> dict[int, dict]:
        """Step -> its record, of the steps that led to the newest weights."""
        kept: dict[int, dict] = {}
        for launch in self.launches:
            if launch.steps:
                kept = {step: record for step, record in kept.items() if step <= launch.restored}
                kept |= {record["step"]: record for record in launch.steps}
        return kept

    def steps_done(self) -> int:
        """Of the history; a checkpoint may be one step ahead of what was reported."""
        last = max(self.history(), default=0)
        return last + 1 if last + 1 in self.checkpoints else last

    def steps_kept(self) -> int:
        """Those that the newest launch goes on from, where it has not reported a step yet."""
        newest = self.launches[-1] if self.launches else None
        return newest.restored if newest and not newest.steps else self.steps_done()


@contextlib.contextmanager
def read(run_dir: Path) -> Iterator[Records]:
    """Metrics and checkpoints first, then the store: of a live run it knows all that the others know. Raises
    LaminarError when `run_dir` is no run."""
    launches, events = _metrics(metrics_of(run_dir))
    config, checkpoints = config_of(run_dir), {step: _state(run_dir, step) for step in steps(run_dir)}
    records = Records(run_dir, config, launches, events, checkpoints, None)
    path = run_dir
    with contextlib.ExitStack() as at_the_end:
        try:
            store = readable_store(run_dir, config.get("store_dir"))
            path = store.path
            connection = at_the_end.enter_context(contextlib.closing(connect_read_only(path, 10.0)))
            has_tables(connection, path)
            records.store = _store(connection, run_dir, config.get("store_dir"))
        except LaminarError as error:
            records.damage = str(error)
        except (sqlite3.Error, msgspec.ValidationError) as error:
            records.damage = f"{path} cannot be read ({error})"
        yield records


def _metrics(path: Path) -> tuple[list[TrainerLaunch], dict[str, list[dict]]]:
    launches: list[TrainerLaunch] = []
    events: dict[str, list[dict]] = {}
    for record in jsonl.read(path):
        kind = str(record.get("kind"))
        if kind in ("start", "restored") or not launches:
            restored = max(0, record.get("restored_step") or 0)
            before = launches[-1] if launches else TrainerLaunch(0, None, {}, None)
            derived = record.get("derived") or before.derived
            size = derived.get("trajectories_per_step", before.trajectories_per_step)
            if kind == "restored" and launches and not launches[-1].steps:
                launches.pop()
            launches.append(TrainerLaunch(restored, size, derived, record.get("refresh", before.refresh)))
        if kind == "step":
            launches[-1].steps.append(record)
        else:
            events.setdefault(kind, []).append(record)
    return launches, events


def _state(run_dir: Path, step: int) -> dict | None:
    """None where it cannot be read."""
    try:
        state = json.loads((checkpoint_path(run_dir, step) / "state.json").read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _store(connection: sqlite3.Connection, run_dir: Path, store_dir: str | None) -> StoreRecords:
    """All but the responses, which follow from the same snapshot."""
    connection.execute("BEGIN")
    trajectories = _rows(
        connection,
        TrajectoryRow,
        "SELECT trajectories.*, score IS NOT NULL AS scored, trajectory_id IS NOT NULL AS stored "
        "FROM trajectories LEFT JOIN responses ON trajectory_id = id ORDER BY id",
    )
    columns = "id, state, weight_step, finish_order, consumed_step, reason"
    groups = _rows(connection, GroupRow, f"SELECT {columns} FROM groups ORDER BY id")
    old_steps = "SELECT consumed_step, trajectories, tokens, id_sum, digest_sum FROM old_steps"
    return StoreRecords(
        dict(connection.execute("SELECT key, value FROM meta")),
        _rows(connection, WeightsRow, "SELECT id, restore_epoch, step FROM weights ORDER BY id"),
        {group.id: group for group in groups},
        trajectories,
        {old.consumed_step: old for old in _rows(connection, OldStep, old_steps)},
        connection,
        run_dir,
        store_dir,
        _seals(connection),
    )


def _seals(connection: sqlite3.Connection) -> dict[tuple[str, int], int | str]:
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'seals'").fetchone():
        return {}
    sql = "SELECT kind, a, digest FROM seals WHERE b = '' AND kind IN (?, ?)"
    rows = connection.execute(sql, (PROMPTS, ARCHIVE))
    return {(kind, a): digest for kind, a, digest in rows}


def _rows(connection: sqlite3.Connection, kind: type[Row], sql: str) -> list[Row]:
    cursor = connection.execute(sql)
    names = [column[0] for column in cursor.description]
    return [msgspec.convert(dict(zip(names, row, strict=True)), kind) for row in cursor]
