"""docs/promises.md#audited: `laminar audit` is clean on a run's own records, and names what was
changed in them."""

import dataclasses
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from helpers.control.script import Script
from helpers.emulated import short_run
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.machine.files.jsonl import Appender
from laminar_hpc.report import rundata, sections
from laminar_hpc.store.audit.checks import SHOWN, AuditFinding, audit
from laminar_hpc.store.audit.records import read
from laminar_hpc.store.payload.layout import pack, unpack
from laminar_hpc.store.payload.writer import FOLDER
from laminar_hpc.store.store import Store

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return short_run.record(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def copy(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


def findings(run_dir: Path) -> dict[str, AuditFinding]:
    with read(run_dir) as records:
        return {finding.name: finding for finding in audit(records)}


def sql(*statements: str) -> Damage:
    def damage(run_dir: Path) -> None:
        with sqlite3.connect(run_dir / "store.sqlite") as database:
            changed = [database.execute(statement).rowcount for statement in statements]
        database.close()
        assert all(changed), "nothing was damaged"

    return damage


def response(change: Callable, state: str = "consumed") -> Damage:
    """Changes the bytes of one trajectory's response."""

    def damage(run_dir: Path) -> None:
        with sqlite3.connect(run_dir / "store.sqlite") as database:
            file, offset, size = database.execute(
                "SELECT file, offset, size FROM trajectories JOIN responses ON trajectory_id = id "
                "WHERE state = ?",
                (state,),
            ).fetchone()
        database.close()
        path = run_dir / FOLDER / file
        content = bytearray(path.read_bytes())
        content[offset : offset + size] = change(bytes(content[offset : offset + size]))
        path.write_bytes(content)

    return damage


def metrics(change: Callable[[list[dict]], None]) -> Damage:
    def damage(run_dir: Path) -> None:
        path = run_dir / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        change(records)
        path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))

    return damage


def checkpoint(step: int, **state: object) -> Damage:
    def damage(run_dir: Path) -> None:
        folder = run_dir / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(exist_ok=True)
        (folder / "state.json").write_text(json.dumps({"step": step, **state}))

    return damage


def without_step(step: int) -> Callable[[list[dict]], None]:
    def change(records: list[dict]) -> None:
        records[:] = [r for r in records if r["kind"] != "step" or r["step"] != step]

    return change


FIRST = "(SELECT MIN(id) FROM trajectories WHERE state = '{}')"
GROUP = "(SELECT MIN(id) FROM groups WHERE state = '{}')"
PLANTED: dict[str, tuple[Damage, str, str]] = {
    "a trajectory is deleted": (
        sql(f"DELETE FROM trajectories WHERE id = {FIRST.format('finished')}"),
        "all ids are on record",
        r"trajectory \d+: not in the store",
    ),
    "a weight id is far beyond the others": (
        sql("UPDATE weights SET id = 1 << 40 WHERE id = (SELECT MAX(id) FROM weights)"),
        "all ids are on record",
        r"weight id \d+ to \d+: not in the store",
    ),
    "a group is deleted": (
        sql(f"DELETE FROM groups WHERE id = {GROUP.format('finished')}"),
        "groups and trajectories agree",
        r"trajectory \d+: its group \d+ is not in the store",
    ),
    "a group is trained twice": (
        sql(
            "UPDATE trajectories SET consumed_step = 2 WHERE group_id = (SELECT MIN(id) FROM groups WHERE "
            "consumed_step = 0)",
            "UPDATE groups SET consumed_step = 2 WHERE id = (SELECT MIN(id) FROM groups WHERE "
            "consumed_step = 0)",
        ),
        "every step has its groups",
        "step 0: 3 groups instead of 4",
    ),
    "the trainer was given something else": (
        metrics(lambda records: next(r for r in records if r["kind"] == "step").update(response_tokens=7)),
        "trained as the trainer says, once",
        r"step 0: the trainer was given 7 response tokens, the store has \d+",
    ),
    "trained beyond the last step": (
        sql(
            "UPDATE groups SET consumed_step = 9 WHERE consumed_step = 2",
            "UPDATE trajectories SET consumed_step = 9 WHERE consumed_step = 2",
        ),
        "every step has its groups",
        "step 9: 4 groups were trained beyond step 3, the last on record",
    ),
    "waiting without a score": (
        sql("UPDATE trajectories SET state = 'finished' WHERE state = 'generated'"),
        "each trajectory has one state",
        r"trajectory \d+: finished, without a score",
    ),
    "given out again after it was complete": (
        sql(f"UPDATE trajectories SET state = 'granted' WHERE id = {FIRST.format('generated')}"),
        "each trajectory has one state",
        r"trajectory \d+: granted, with a response",
    ),
    "a response is deleted": (
        sql(f"DELETE FROM responses WHERE trajectory_id = {FIRST.format('consumed')}"),
        "each trajectory has one state",
        r"trajectory \d+: consumed, without a response",
    ),
    "no such state": (
        sql(f"UPDATE trajectories SET state = 'lost' WHERE id = {FIRST.format('granted')}"),
        "each trajectory has one state",
        r"trajectory \d+: 'lost' is no state",
    ),
    "trained, but its group waits": (
        sql(
            "UPDATE groups SET state = 'finished', consumed_step = NULL "
            f"WHERE id = {GROUP.format('consumed')}"
        ),
        "groups and trajectories agree",
        r"trajectory \d+: consumed, its group \d+ is finished",
    ),
    "two samples of one number": (
        sql("UPDATE trajectories SET sample_index = 0 WHERE state = 'finished'"),
        "groups and trajectories agree",
        r"group \d+: its samples are numbered \[0, 0",
    ),
    "a group without its second sample": (
        sql(
            "DELETE FROM responses WHERE trajectory_id = (SELECT MAX(id) FROM trajectories WHERE "
            "state = 'finished')",
            "DELETE FROM trajectories WHERE id = (SELECT MAX(id) FROM trajectories WHERE state = 'finished')",
        ),
        "groups and trajectories agree",
        r"group \d+: 1 trajectories instead of 2 to 4",
    ),
    "given up without a reason": (
        sql("UPDATE groups SET reason = NULL WHERE state = 'given_up'"),
        "given up for a reason",
        r"group \d+: given up without a reason",
    ),
    "finished as the same one": (
        sql("UPDATE groups SET finish_order = 2 WHERE finish_order = 1"),
        "finished in one order",
        r"groups \d+ and \d+: both finished as number 2",
    ),
    "a weight id of an older epoch": (
        sql("UPDATE weights SET restore_epoch = 1 WHERE id = 0"),
        "weight ids rise",
        "weight id 1: of epoch 0, after one of epoch 1",
    ),
    "a weight id used twice": (
        sql("UPDATE weights SET step = 0 WHERE id = 1"),
        "weight ids have one step",
        "weight id 1: step 1 in metrics.jsonl, 0 in the store",
    ),
    "an attempt falls": (
        metrics(lambda records: records.append({"kind": "lost", "trajectory_id": 3, "attempt": 5})),
        "attempts rise",
        "trajectory 3: attempt 0, after attempt 5 was lost",
    ),
    "a token changes": (
        response(lambda packed: packed[:90] + bytes([packed[90] ^ 1]) + packed[91:]),
        "responses have their digests",
        r"the response of trajectory \d+ is not in .* as it was generated \(it has not the digest",
    ),
    "a log-prob changes": (
        response(lambda packed: packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:], "finished"),
        "responses have their digests",
        r"the response of trajectory \d+ is not in .* as it was generated \(it has not the digest",
    ),
    "the response of another attempt": (
        response(lambda packed: pack(dataclasses.replace(unpack(packed), attempt=4)), "generated"),
        "responses have their digests",
        r"trajectory \d+: attempt 0, its response is of trajectory \d+, attempt 4",
    ),
    "a step is missing": (
        metrics(without_step(1)),
        "steps follow on each other",
        "launch 1: step 2 follows on step 0",
    ),
    "a checkpoint that nobody made": (
        checkpoint(9),
        "steps follow on each other",
        "checkpoint of step 9: no step after 3 is on record",
    ),
    "a checkpoint of another store": (
        checkpoint(2, store_id="f00d"),
        "steps follow on each other",
        r"checkpoint of step 2: it belongs to store f00d, the run has [0-9a-f]{16}",
    ),
    "no store": (
        lambda run_dir: (run_dir / "store.sqlite").unlink(),
        "the store can be read",
        "store.sqlite cannot be read",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_damage_is_found(copy, what):
    """By the check that is there for it, with the culprit's id."""
    damage, check, text = PLANTED[what]
    damage(copy)
    found = findings(copy)[check]
    assert found.wrong >= 1
    assert any(re.search(text, culprit) for culprit in found.culprits), found.culprits


def test_a_clock_that_was_set_back_is_no_damage(copy):
    """Nor one of another machine that is behind: no check believes in times."""
    store = Store(copy)
    store._db.execute("UPDATE weights SET published_at = published_at + 600 WHERE id = 0")
    store._db.execute("UPDATE groups SET granted_at = granted_at + 600 WHERE id = 0")
    store.close()
    assert not [found.name for found in findings(copy).values() if found.wrong]


def test_the_command_says_clean_or_names_culprits(copy, tmp_path, capsys):
    """Exit codes and --json; of many culprits the first are shown. Nothing is written to the run."""
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    target = tmp_path / "audit.json"
    assert cli.run(["audit", str(copy), "--json", str(target)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "clean"
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    written = json.loads(target.read_text())
    assert written["clean"] and written["steps"] == 3 and written["newest_checkpoint"] == 2
    assert sum(written["trajectories"].values()) == 48 and all(written["trajectories"].values())
    assert sum(written["given_up_because"].values()) == written["trajectories"]["given up"]

    sql("UPDATE trajectories SET digest = 'f00d' WHERE digest IS NOT NULL")(copy)
    assert cli.run(["audit", str(copy), f"--json={target}"]) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "88 culprits" and f"and {44 - SHOWN} more" in shown
    assert json.loads(target.read_text())["clean"] is False
    with pytest.raises(LaminarError, match=r"is no run: no metrics\.jsonl there"):
        cli.run(["audit", str(tmp_path)])
    with pytest.raises(LaminarError, match=r"--json .* cannot be written"):
        cli.run(["audit", str(copy), "--json", str(tmp_path)])


def test_a_live_run_is_audited(tmp_path):
    """While the controller has the store open, between any two messages."""
    config = short_run.configuration(tmp_path)
    script = Script(config)
    heard, audits = script.hear, 0

    def audited(*args, **fields) -> None:
        nonlocal audits
        heard(*args, **fields)
        audits += 1
        found = [culprit for f in findings(Path(config.run_dir)).values() for culprit in f.culprits]
        assert not found, found

    script.hear = audited
    short_run.fill(script, 0, config.algorithm.prompts_per_step)
    script.trains(0)
    script.closes()
    assert audits > 30


def test_accuracy_is_given_by_weight_id(run_dir):
    """Each step says how right its trajectories of each weight id were; the report adds up what was trained
    of an id in several steps, each trajectory once, also after a restore."""
    run = rundata.load(run_dir)
    with closing(sqlite3.connect(run_dir / "store.sqlite")) as database:
        of = "SELECT weight_id, COUNT(*), AVG(accuracy) FROM trajectories WHERE state = 'consumed'"
        for step in run.steps:
            where = f"AND consumed_step = {step['step'] - 1} GROUP BY weight_id ORDER BY weight_id"
            assert step["accuracy_by_weight_id"] == [list(row) for row in database.execute(f"{of} {where}")]
        every = {i: mean for i, _, mean in database.execute(f"{of} GROUP BY weight_id")}
    assert len(run.steps) == 3 and len({a for s in run.steps for a, _, _ in s["accuracy_by_weight_id"]}) > 1
    assert dict(sections.accuracy_by_weight_id(run)) == pytest.approx(every)
    assert "by the weights that generated" in sections.learning(run)


def test_a_start_that_has_not_gone_back_yet(copy):
    """A launch that says from where it goes on, before the store has gone back and any step was done."""
    Appender(copy / "metrics.jsonl", seals=True).write({"kind": "start", "time": 1.0, "restored_step": 2})
    assert not [culprit for finding in findings(copy).values() for culprit in finding.culprits]
