"""What the records of a run say: metrics.jsonl, the checkpoints and one snapshot of the store, as the checks
want them."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from laminar_hpc.cluster.checkpoints import checkpoint_path, steps
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.controller.store_copy import readable_store
from laminar_hpc.observability import jsonl


class GroupRow(msgspec.Struct):
    id: int
    state: str
    weight_step: int
    finish_order: int | None
    consumed_step: int | None
    reason: str | None


class TrajectoryRow(msgspec.Struct):
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


class WeightsRow(msgspec.Struct):
    id: int
    restore_epoch: int
    step: int
    published_at: float


class Response(msgspec.Struct):
    """Of a stored response what the checks need."""

    trajectory_id: int
    attempt: int
    response_tokens: list[int]
    logprobs: list[float]
    digest: str = ""


@dataclass
class Launch:
    """One start of the trainers from a checkpoint, and the steps that it reported. `restored`: 0 where there
    was no checkpoint."""

    restored: int
    trajectories_per_step: int | None
    steps: list[dict] = field(default_factory=list)


@dataclass
class StoreRecords:
    meta: dict[str, str]
    weights: list[WeightsRow]
    groups: dict[int, GroupRow]
    trajectories: list[TrajectoryRow]
    connection: sqlite3.Connection

    def responses(self) -> Iterator[tuple[int, Response | None]]:
        """(trajectory id, its response); None for what is no response."""
        decoder = msgspec.msgpack.Decoder(Response)
        for trajectory_id, payload in self.connection.execute(
            "SELECT trajectory_id, payload FROM responses ORDER BY trajectory_id"
        ):
            try:
                yield trajectory_id, decoder.decode(payload)
            except (msgspec.DecodeError, TypeError):
                yield trajectory_id, None


@dataclass
class Records:
    """`damage`: why there is no store. `events`: the other kinds of metrics.jsonl."""

    run_dir: Path
    config: dict
    launches: list[Launch]
    events: dict[str, list[dict]]
    checkpoints: dict[int, dict | None]  # step -> its state.json
    store: StoreRecords | None
    damage: str = ""

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
    if not (run_dir / "metrics.jsonl").is_file():
        raise LaminarError(
            f"{run_dir} is no run: no metrics.jsonl there; name the run_dir of a `laminar train`"
        )
    launches, events = _metrics(run_dir)
    config, checkpoints = _config(run_dir), {step: _state(run_dir, step) for step in steps(run_dir)}
    records = Records(run_dir, config, launches, events, checkpoints, None)
    path = run_dir
    with contextlib.ExitStack() as at_the_end:
        try:
            store = readable_store(run_dir, config.get("store_dir"))
            path = store.path
            connection = at_the_end.enter_context(contextlib.closing(_connect(path)))
            records.store = _store(connection)
        except Refused as error:
            records.damage = str(error)
        except (sqlite3.Error, msgspec.ValidationError) as error:
            records.damage = f"{path} cannot be read ({error})"
        yield records


def _metrics(run_dir: Path) -> tuple[list[Launch], dict[str, list[dict]]]:
    launches: list[Launch] = []
    events: dict[str, list[dict]] = {}
    for record in jsonl.read(run_dir / "metrics.jsonl"):
        kind = str(record.get("kind"))
        if kind in ("start", "restored") or not launches:
            restored = max(0, record.get("restored_step") or 0)
            size = launches[-1].trajectories_per_step if launches else None
            size = (record.get("derived") or {}).get("trajectories_per_step", size)
            if kind == "restored" and not launches[-1].steps:
                launches.pop()
            launches.append(Launch(restored, size))
        if kind == "step":
            launches[-1].steps.append(record)
        else:
            events.setdefault(kind, []).append(record)
    return launches, events


def _config(run_dir: Path) -> dict:
    try:
        return yaml.safe_load((run_dir / "config.yaml").read_text()) or {}
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        text = str(error).splitlines()[0]
        raise LaminarError(
            f"{run_dir / 'config.yaml'} is not YAML ({text}); restore it from the run"
        ) from None


def _state(run_dir: Path, step: int) -> dict | None:
    """None where it cannot be read."""
    try:
        state = json.loads((checkpoint_path(run_dir, step) / "state.json").read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _connect(path: Path) -> sqlite3.Connection:
    # without a write-ahead log SQLite need not create files of its own to read
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, timeout=10.0, isolation_level=None)


def _store(connection: sqlite3.Connection) -> StoreRecords:
    """All but the responses, which follow from the same snapshot."""
    connection.execute("BEGIN")
    rows = connection.execute(
        "SELECT id, group_id, sample_index, attempt, state, weight_id, weight_step, consumed_step, "
        "response_length, digest, score IS NOT NULL AS scored, trajectory_id IS NOT NULL AS stored "
        "FROM trajectories LEFT JOIN responses ON trajectory_id = id ORDER BY id"
    )
    trajectories = [msgspec.convert(row, TrajectoryRow) for row in _named(rows)]
    columns = "id, state, weight_step, finish_order, consumed_step, reason"
    groups = connection.execute(f"SELECT {columns} FROM groups ORDER BY id")
    weights = connection.execute("SELECT id, restore_epoch, step, published_at FROM weights ORDER BY id")
    return StoreRecords(
        dict(connection.execute("SELECT key, value FROM meta")),
        [msgspec.convert(row, WeightsRow) for row in _named(weights)],
        {row["id"]: msgspec.convert(row, GroupRow) for row in _named(groups)},
        trajectories,
        connection,
    )


def _named(cursor: sqlite3.Cursor) -> Iterator[dict]:
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)
