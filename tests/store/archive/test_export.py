"""`laminar export` and the audit over a run of the real controller, before and after steps are archived."""

import json
import shutil
import sqlite3
from pathlib import Path

import pandas
import pytest
import yaml

from helpers.emulated.archive_run import archive
from helpers.emulated.short_run import record
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.report import rundata, summary
from laminar_hpc.store import old_steps
from laminar_hpc.store.archive import files
from laminar_hpc.store.store import Store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("export"))


@pytest.fixture
def run_dir(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def exported(run_dir: Path, out: Path, *words: str) -> list[dict]:
    assert cli.run(["export", str(run_dir), "--out", str(out), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_same_rows_wherever_they_are(run_dir, tmp_path, capsys):
    """Promise: prompt, response, tokens, reward, weight ids, step and staleness of all that was trained, and
    of what waits; the same before and after a step is archived, and as Parquet."""
    before = exported(run_dir, tmp_path / "before.jsonl")
    archive(run_dir)
    after = exported(run_dir, tmp_path / "after.jsonl")
    assert before == after and {row["step"] for row in after} == {1, 2, 3, None}
    row = after[0]
    assert (
        row["step"] == 1
        and row["staleness"] == 0
        and len(row["response_tokens"]) == len(row["logprobs"]) == 12
    )
    assert row["reward"] in (0.0, 1.0) and row["version_spans"][0]["weight_id"] == row["weight_id"]
    assert isinstance(row["prompt"], str) and isinstance(row["response"], str)
    assert [r["step"] for r in exported(run_dir, tmp_path / "two.jsonl", "--steps", "2:3")] == [
        r["step"] for r in after if r["step"] in (2, 3)
    ]
    assert cli.run(["export", str(run_dir), "--format=parquet", "--out", str(tmp_path / "all.parquet")]) == 0
    frame = pandas.read_parquet(tmp_path / "all.parquet")
    assert frame.trajectory_id.tolist() == [r["trajectory_id"] for r in after]
    assert frame.response.tolist() == [r["response"] for r in after]
    assert cli.run(["export", str(run_dir), "--out", str(tmp_path / "named.parquet")]) == 0
    assert pandas.read_parquet(tmp_path / "named.parquet").equals(frame)
    files.path_of(run_dir, 1).unlink()
    rest = exported(run_dir, tmp_path / "rest.jsonl")
    assert {r["step"] for r in rest} == {2, 3, None} and "left out: 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs --out PATH"),
        (["--out", "x.csv", "--format", "csv"], "--format csv: use jsonl or parquet"),
        (["--out", "x", "--steps", "1-3"], "--steps 1-3: write A:B"),
        (["--out", "x", "--steps", "3:1"], "--steps 3:1: no step is in it"),
        (["--out", "metrics.jsonl"], "metrics.jsonl exists; name another file"),
        (["--out", "y.csv"], "--out y.csv: use jsonl or parquet"),
        (["--out", "config.yaml"], "--out config.yaml: use jsonl or parquet"),
        (["--out", "missing/x"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(run_dir, monkeypatch, words, says):
    """Promise: one clear line, and no file."""
    monkeypatch.chdir(run_dir)
    before = sorted(Path().iterdir())
    with pytest.raises(LaminarError, match=says) as caught:
        cli.run(["export", str(run_dir), *words])
    assert "\n" not in str(caught.value) and sorted(Path().iterdir()) == before


def test_what_is_no_run_is_one_line(tmp_path):
    """Promise: a folder that is no run is named."""
    with pytest.raises(LaminarError, match="is no run"):
        cli.run(["export", str(tmp_path), "--out", str(tmp_path / "x")])


def test_a_configuration_that_cannot_be_read_is_one_line(run_dir, tmp_path):
    """Promise: no traceback for a config.yaml that is damaged."""
    (run_dir / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaminarError, match=r"config.yaml cannot be read .*; restore it from the run$"):
        cli.run(["export", str(run_dir), "--out", str(tmp_path / "x")])


def audited(run_dir: Path) -> dict:
    """What `laminar audit --json` writes, its checks by name."""
    target = run_dir.parent / "audit.json"
    code = cli.run(["audit", str(run_dir), "--json", str(target)])
    found = json.loads(target.read_text())
    assert found["clean"] == (code == 0)
    return found | {"checks": {check["name"]: check for check in found["checks"]}}


def test_an_archived_run_is_audited(run_dir):
    """docs/promises.md#audited: clean after archiving; a file that is gone, and one of other responses,
    are culprits."""
    archive(run_dir)
    found, name = audited(run_dir), "archived responses have theirs"
    assert found["clean"], found
    assert found["checks"][name]["looked_at"] > 0
    shutil.copy(files.path_of(run_dir, 2), files.path_of(run_dir, 1))
    told = audited(run_dir)["checks"][name]
    assert any("which did not train it" in line for line in told["culprits"]) and told["wrong"] > 1
    files.path_of(run_dir, 1).unlink()
    told = audited(run_dir)["checks"][name]
    assert told["culprits"] == ["step 1: the archive has no file of it (archive=all)"]


def test_what_the_writer_has_let_go_is_no_culprit(run_dir):
    """docs/promises.md#audited: a writer removes what the setting lets go as soon as the next file is
    there, before the store counts its step; a run that dies in between is clean."""
    archive(run_dir)
    path = run_dir / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"archive": "last:2"}))
    shutil.copy(files.path_of(run_dir, 2), files.path_of(run_dir, 3))
    files.prune(run_dir, "last:2", 3)
    assert files.steps(run_dir) == [2, 3]
    assert audited(run_dir)["checks"]["archived responses have theirs"]["culprits"] == []


def test_old_steps_are_audited_by_their_sums(run_dir, tmp_path, monkeypatch):
    """docs/promises.md#audited: where the store has sums in place of rows, the audit is clean, counts the
    same, and finds what is missing; export and report have the same."""
    before, told = audited(run_dir), exported(run_dir, tmp_path / "before.jsonl")
    figures = summary.build(run_dir)
    archive(run_dir)
    monkeypatch.setattr(old_steps, "ROWS_MAX", 0)
    store = Store(run_dir)
    while store.old_steps.trim(2):
        pass
    store.close()
    found = audited(run_dir)
    assert found["clean"], found
    assert found["trajectories"] == before["trajectories"] and found["trajectories"]["given up"] > 0
    assert sum(found["given_up_because"].values()) == before["trajectories"]["given up"]
    assert exported(run_dir, tmp_path / "after.jsonl") == told
    assert summary.build(run_dir) == figures
    assert rundata.load(run_dir).of_consumed.startswith("the newest ")
    intact = files.path_of(run_dir, 1).read_bytes()
    shutil.copy(files.path_of(run_dir, 2), files.path_of(run_dir, 1))
    told = audited(run_dir)["checks"]["archived responses have theirs"]
    changed, *prompts, sums = told["culprits"]
    assert changed == "step 1: step_000001.parquet has changed since it was written"
    assert sums == "step 1: step_000001.parquet does not hold what it trained, by the store's sums"
    assert not prompts
    files.path_of(run_dir, 1).write_bytes(intact)
    with sqlite3.connect(run_dir / "store.sqlite") as database:
        database.execute("DELETE FROM trajectories WHERE id = (SELECT MAX(id) - 1 FROM trajectories)")
    database.close()
    [culprit] = audited(run_dir)["checks"]["all ids are on record"]["culprits"]
    assert "trajectories were granted; rows and sums hold" in culprit
