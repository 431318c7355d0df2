"""docs/week_one.md: what it tells those with few GPUs to type starts, and what it asks is answered."""

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.paths import ROOT
from laminar_hpc.launch import cli, project

PAGE = (ROOT / "docs/week_one.md").read_text()


def block(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n.*?^```\w*\n(.*?)^```", PAGE, re.M | re.S)
    assert found, heading
    return found[1]


def test_few_gpus_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: with one, two and four GPUs, with a project's own data and reward, as dry runs."""
    project.make(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    lines = block("Fewer than 8 GPUs").replace("FILE", "data/train.jsonl").replace("NAME", "rewards.score")
    assert len(lines.splitlines()) == 4
    for line in lines.splitlines():
        _, command, *words = shlex.split(line.split("  #")[0])
        more = ["dry_run=true"] if command == "train" else []
        assert cli.run([command, *words, *more]) == 0, line
    printed = capsys.readouterr().out
    assert [f"gpus unless shared       {n}" in printed for n in (2, 4)] == [True, True]
    assert re.search(r"^plan +train on \d A100; ", printed, re.M)


def test_the_questions_of_the_first_week_have_an_answer() -> None:
    """Promise: each row that points to this page finds its section, with something to type in it."""
    for question in ("Fewer than 8 GPUs", "Does it outlive my ssh session?", "Is there a Python API?"):
        assert block(question)
    assert "data.system_prompt" in PAGE
    assert "tmux" in block("Does it outlive my ssh session?")


def test_what_a_script_reads_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the Python lines are valid, and read the files that a run writes."""
    code = block("Is there a Python API?")
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/summary.json").write_text(json.dumps({"steps": 1}))
    (tmp_path / "runs/one/metrics.jsonl").write_text('{"kind": "step", "step": 1}\n{"kind": "end"}\n')
    started = []
    monkeypatch.setattr("subprocess.run", lambda words, check: started.append(words))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "week_one", "exec"), names)
    assert started[0][:2] == ["laminar", "train"] and names["summary"] == {"steps": 1}
    assert names["steps"] == [{"kind": "step", "step": 1}]
