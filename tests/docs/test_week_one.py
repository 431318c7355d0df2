"""docs/week_one.md: what it tells those with few GPUs to type starts, and what it asks is answered."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


class Written:
    """A process that writes a run of one step and ends."""

    code = 0

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        folder = Path(next(w for w in words if w.startswith("run_dir=/")).partition("=")[2])
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"steps": 1}))
        (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 0.5}\n{"kind": "end"}\n')

    def raise_if_failed(self) -> None:
        """It has not."""


def test_what_a_script_reads_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the Python lines are valid, and read the files that a run writes."""
    code = block("Is there a Python API?")
    monkeypatch.setattr("laminar_hpc.launch.python_api.TrainProcess", Written)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "week_one", "exec"), names)
    assert names["run"]._process.words[0] == "experiment=demo" and names["summary"] == {"steps": 1}
    assert names["run"].run_dir == tmp_path / "runs/one" and names["steps"].loss.to_dict() == {1: 0.5}
