"""docs/promises.md#audited: every column of store, archive, payload files, metrics and checkpoint is
changed, one at a time, and the audit names each change. The columns are those that the files have, so that
none can be forgotten."""

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import checkpoint_files
from helpers.emulated import archive_run as emulated_run
from helpers.emulated import short_run
from laminar_hpc.config.errors import Refused
from laminar_hpc.launch import cli
from laminar_hpc.machine.files.jsonl import Appender
from laminar_hpc.store import old_steps
from laminar_hpc.store.archive import files, table
from laminar_hpc.store.audit import origins, sealed, steps
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.store.payload.writer import FOLDER
from laminar_hpc.store.same_run import refuse_unsound_source
from laminar_hpc.store.seals import UNSEALED_KEY
from laminar_hpc.store.store import Store

# in meta: the place of the store in its journal, which has checksums of its own; only with store_dir
PROVE_NOTHING = {UNSEALED_KEY}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run with a row in each table: of three steps the first is a row of sums and a file of the archive,
    the second has rows and a file, the third is in payload files."""
    config = short_run.configuration(tmp_path_factory.mktemp("tampered"))
    config.pipeline.max_staleness = 2
    run_dir = short_run.record(Path(config.run_dir).parent, config)
    emulated_run.archive(run_dir)
    shutil.rmtree(checkpoint_path(run_dir, 3))
    checkpoint_files.write(run_dir, 3)
    store = Store(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(old_steps, "ROWS_MAX", 0)
        while store.old_steps.trim(1):
            pass
    store.note_received({"rollout:0:1": 7})
    store.note_evaluated("after/greedy", 3, 1, 0.5, 12)
    [(trained,)] = store._db.execute("SELECT MAX(id) FROM trajectories WHERE state = 'consumed'")
    store.rows.note_mismatches({trained: (0.25, 1)})
    store.rows.note_left_out([trained], {trained: "mismatch"})
    store.close()
    return run_dir


@pytest.fixture
def copy(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def the_configuration_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is most of what an audit of so small a run takes, and no test changes it."""
    monkeypatch.setattr(steps, "read_config", cache(steps.read_config))


def culprits(run_dir: Path) -> list[str]:
    with read(run_dir) as records:
        return [line for finding in audit(records) for line in finding.culprits]


def changed(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return [changed(value[0]), *value[1:]] if value else [1]
    if isinstance(value, dict):
        return {**value, (key := min(value)): changed(value[key])} if value else {"x": 1}
    return 1 if value is None else value + 1


def rows_of(store: sqlite3.Connection, name: str, keys: list[str]) -> Iterator[tuple]:
    """The first and the last, and all of meta."""
    rows = store.execute(f"SELECT {', '.join(keys)} FROM {name} ORDER BY {', '.join(keys)}").fetchall()
    assert rows, f"no row of {name} to be changed"
    return iter([r for r in rows if r[0] not in PROVE_NOTHING] if name == "meta" else {rows[0], rows[-1]})


def columns(store: sqlite3.Connection) -> Iterator[tuple[str, str, list[str]]]:
    """Table, column, and the primary key of the table."""
    for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        info = store.execute(f"PRAGMA table_info({name})").fetchall()
        keys = [row[1] for row in sorted(info, key=lambda row: row[5]) if row[5]]
        yield from ((name, row[1], keys) for row in info)


def test_the_run_is_clean(run_dir):
    """Promise: what the other tests change was not named before."""
    assert culprits(run_dir) == []


def test_every_column_of_the_store(copy):
    """Promise: a changed value is named with its row, also a time that no check believes in; so is a row that
    is deleted."""
    path = copy / "store.sqlite"
    intact, count, named = path.read_bytes(), 0, 0
    with closing(sqlite3.connect(path)) as store:
        found = [(*column, list(rows_of(store, column[0], column[2]))) for column in columns(store)]
    assert len({name for name, *_ in found}) > 10

    def try_out(sql: str, key: tuple, words: set[str]) -> bool:
        with closing(sqlite3.connect(path, isolation_level=None)) as store:
            assert store.execute(sql, key).rowcount == 1, sql
        told = culprits(copy)
        path.write_bytes(intact)
        whole = ("cannot be read", "was written by another version")  # of a store that is none any more
        row = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)")
        return any(row.search(line) or any(text in line for text in whole) for line in told)

    for name, column, keys, rows in found:
        where, good = " AND ".join(f"{key} = ?" for key in keys), True
        for key in rows:
            with closing(sqlite3.connect(path)) as store:
                [(value,)] = store.execute(f"SELECT {column} FROM {name} WHERE {where}", key)
            new = changed(value) if column not in keys or isinstance(value, str) else value + 1_000_000
            sql = f"UPDATE {name} SET {column} = ? WHERE {where}"
            words = {str(part) for part in (*key, new if column in keys else key[0])}
            words |= {str(part) for part in key if name == "seals"}
            good = try_out(sql, (new, *key), words) and good
            if column == keys[0] and name not in ("seals", "responses"):  # given-up ones are let go
                good = try_out(f"DELETE FROM {name} WHERE {where}", key, words) and good
            assert good, f"a change of {name}.{column} is not named: {key}"
        count, named = count + 1, named + good
    print(f"store: {count} columns changed, {named} named")
    assert count == named


@pytest.mark.parametrize("has_sum", [True, False])
def test_every_column_of_the_archive(copy, has_sum):
    """Promise: by the digest of the file, and where an earlier version kept none by the rows of the store."""
    if not has_sum:
        with sqlite3.connect(copy / "store.sqlite") as store:
            store.execute("DELETE FROM seals WHERE kind = 'archive' OR a = 'sealed'")
            store.execute("DELETE FROM meta WHERE key = 'sealed'")
        store.close()
    path = files.path_of(copy, 2)
    rows, named = pq.read_table(path), 0
    for at, column in enumerate(table.SCHEMA):
        values = rows.column(column.name).to_pylist()
        if column.name == "reward_parts":
            values[0] = json.dumps({"accuracy": 0.5})
        else:
            values[0] = changed(values[0]) if values[0] != [] else [1]
        pq.write_table(rows.set_column(at, column, [pa.array(values, column.type)]), path)
        told = [line for line in culprits(copy) if "step_000002.parquet" in line]
        assert told, f"a change of {column.name} is not named"
        named += 1
    print(f"archive: {len(table.SCHEMA)} columns changed, {named} named")
    pq.write_table(pa.concat_tables([rows, rows.slice(0, 1)]), path)
    assert any("twice in step_000002.parquet" in line for line in culprits(copy))


def test_every_byte_of_a_response(copy):
    """Promise: header, spans, tokens, log-probs and mask of a payload file."""
    with closing(sqlite3.connect(copy / "store.sqlite")) as store:
        sql = "SELECT file, offset, size FROM responses ORDER BY trajectory_id LIMIT 1"
        [(file, offset, size)] = store.execute(sql)
    path = copy / FOLDER / file
    intact = path.read_bytes()
    with read(copy) as records:
        for at in range(offset, offset + size):
            path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
            told = [line for line in origins.responses_are_intact(records, records.store) if line]
            assert len(told) == 1 and path.name in told[0], f"byte {at - offset}"


def test_every_field_of_the_metrics(copy):
    """Promise: of each kind of line, each field, its seal too; a line that is cut short is named as well."""
    path = copy / "metrics.jsonl"
    lines, count = path.read_bytes().splitlines(keepends=True), 0
    seen = set[tuple[str, str]]()
    with read(copy) as records:

        def named(number: int, line: bytes) -> bool:
            path.write_bytes(b"".join([*lines[: number - 1], line, *lines[number:]]))
            told = [text for text in sealed.lines_are_as_written(records, records.store) if text]
            return told == [f"metrics.jsonl: line {number} is not as the run wrote it"]

        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            for name in record.keys() - {name for kind, name in seen if kind == record["kind"]}:
                seen.add((record["kind"], name))
                new = json.dumps(record | {name: changed(record[name])}, separators=(",", ":"))
                assert named(number, new.encode() + b"\n"), (record["kind"], name)
                count += 1
            for damage in (b'{"kind":"end"}\n', line.replace(b'"seal"', b'"zeal"'), line[:-2] + b"]\n"):
                assert named(number, damage), damage
    assert {"start", "step", "restored", "lost"} <= {kind for kind, _ in seen}
    print(f"metrics: {count} columns changed, {count} named")


def test_bytes_of_the_newest_checkpoint(copy):
    """Promise: every third byte of each of its files, also of the list of sums and of its signature; a file
    that is missing."""
    folder, count = checkpoint_path(copy, 3), 0
    with read(copy) as records:

        def told() -> list[str]:
            return [line for line in steps.steps_follow(records) if line]

        for path in [p for p in folder.rglob("*") if p.is_file()]:
            intact = path.read_bytes()
            for at in range(0, len(intact), 3):
                path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
                assert any("checkpoint of step 3" in line for line in told()), (path.name, at)
                count += 1
            path.unlink()
            if path.name != "signature.json":
                assert any(f"{path.name} is missing" in line for line in told()), path.name
            path.write_bytes(intact)
        assert told() == [] and count > 300


NEWEST = "(SELECT MAX(id) FROM trajectories WHERE state = 'consumed')"


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        (f"UPDATE trajectories SET reward = 3 WHERE id = {NEWEST}", "its reward is not that of its score"),
        (f"UPDATE trajectories SET accuracy = 3 WHERE id = {NEWEST}", "its accuracy is not that of"),
        (f"UPDATE trajectories SET score = x'00' WHERE id = {NEWEST}", "its score cannot be read"),
        (f"UPDATE trajectories SET policies = 2 WHERE id = {NEWEST}", "2 policies drew its tokens"),
        (f"UPDATE trajectories SET trained = 2 WHERE id = {NEWEST}", "12 drawn tokens, 2 on record"),
        (f"UPDATE trajectories SET weight_step = -28 WHERE id = {NEWEST}", "staleness 30, at most 2"),
        (f"UPDATE trajectories SET step_finished = 9 WHERE id = {NEWEST}", "staleness_generation_mean"),
        (f"UPDATE trajectories SET finish_reason = 'length' WHERE id = {NEWEST}", "truncated_fraction 0 in"),
    ],
)
def test_what_is_sealed_again_must_still_agree(copy, sql, says):
    """Promise: without any seal the columns are held against each other, the launch and metrics.jsonl."""
    store = Store(copy)
    store._db.execute(sql)
    store.close()
    assert any(says in line for line in culprits(copy)), culprits(copy)


def test_a_step_s_figures_are_those_of_its_rows(copy):
    """Promise: another reward_mean in a line that has a seal of its own is named."""
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    at = max(n for n, line in enumerate(lines) if b'"kind":"step"' in line)
    record = json.loads(lines.pop(at))
    record.pop("seal")
    path.write_bytes(b"".join(line + b"\n" for line in lines[:at]))
    Appender(path, seals=True).write(record | {"reward_mean": 0.9})
    with open(path, "ab") as file:
        file.writelines(line + b"\n" for line in lines[at:])
    [told] = culprits(copy)
    assert told == "step 2: reward_mean 0.9 in metrics.jsonl, 0.5 by the store"


def test_a_run_of_an_earlier_version_is_audited(copy, capsys):
    """Promise: a run without seals is clean, and one line says what cannot be proven of it; once a later
    version goes on, what that writes is proven."""
    with sqlite3.connect(copy / "store.sqlite") as store:
        store.execute("DROP TABLE seals")
        store.execute("DELETE FROM meta WHERE key = 'sealed'")
    store.close()
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    with open(copy / "metrics.jsonl", "w") as file:
        for line in lines:
            line.pop("seal")
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    assert cli.run(["audit", str(copy)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("not proven: ")] == [shown[-3]] and shown[-1] == "clean"
    store = Store(copy)
    store.put("later", 1)
    store.close()
    assert culprits(copy) == []
    with sqlite3.connect(copy / "store.sqlite") as store:
        store.execute("UPDATE meta SET value = '2' WHERE key = 'later'")
    store.close()
    assert culprits(copy) == ["the store's row later of meta is not as the run wrote it"]


def test_a_replay_of_it_is_refused(copy, tmp_path):
    """Promise: docs/data.md. What an audit would object to is not trained again; a sound run is."""
    config = short_run.configuration(tmp_path)
    config.source = f"replay:{copy}"
    refuse_unsound_source(config)
    with sqlite3.connect(copy / "store.sqlite") as store:
        store.execute(f"UPDATE trajectories SET reward = 1 - reward WHERE id = {NEWEST}")
    store.close()
    with pytest.raises(Refused, match=r"replay:.* its records are not as .*; see laminar audit ") as raised:
        refuse_unsound_source(config)
    assert "\n" not in str(raised.value)


def test_the_seals_of_many_rows_are_looked_up_by_their_index(copy):
    """Promise: an audit of 10^5 rows takes seconds: twice as many rows take twice the time."""
    store = Store(copy)
    store._db.executemany("INSERT INTO mismatches VALUES(?, 0.5, 0)", [(i,) for i in range(1000, 41_000)])
    store.close()
    with read(copy) as records:
        begun = time.process_time()
        assert not any(sealed.rows_are_as_written(records, records.store))
        assert time.process_time() - begun < 15.0  # 0.3 by the index, minutes without
