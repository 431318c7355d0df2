"""`laminar init DIR`: a project that runs as it is, and that shows how to write one's own data and reward."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli, project

COMMAND = [sys.executable, "-m", "laminar_hpc.launch.cli"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "mine"
    project.make(folder)
    return folder


def test_every_file_is_well_formed(made: Path):
    """Promise: YAML, JSON lines, Python and shell parse; no placeholder is left; whoever may read the folder
    may read all of it."""
    for path in (p for p in made.rglob("*") if p.is_file()):
        assert path.stat().st_mode & 0o444 == 0o444 & ~current_umask(), path
        if path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text())
        elif path.suffix == ".jsonl":
            assert all(
                {"prompt", "answer"} <= set(json.loads(line)) for line in path.read_text().splitlines()
            )
        elif path.suffix == ".py":
            compile(path.read_text(), path, "exec")
        elif path.suffix == ".sbatch":
            assert "@" not in path.read_text().replace('"$@"', "").replace("B:USR1@", "")
            subprocess.run(["bash", "-n", path], check=True)
            assert os.access(path, os.X_OK)
    assert sys.prefix in (made / "train.sbatch").read_text()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_dry_run_passes_as_it_is(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Promise: the first command of its README finds everything that it needs."""
    monkeypatch.chdir(made)
    first = re.search(r"^laminar train (.*?) *#", (made / "README.md").read_text(), re.M)[1].split()
    assert first[-1] == "dry_run=true"
    assert cli.run(["train", *first]) == 0
    printed = capsys.readouterr().out
    assert "448,128" in printed and "before a run" not in printed


def test_its_data_are_what_its_script_writes(made: Path, tmp_path: Path):
    """Promise: the example of how to make data is the true one, and no held-out problem is trained on."""
    script = tmp_path / "make_data.py"
    script.write_text((made / "data/make_data.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    rows = {}
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (made / "data" / name).read_bytes()
        rows[name] = {json.loads(line)["prompt"] for line in (tmp_path / name).read_text().splitlines()}
    assert not rows["train.jsonl"] & rows["heldout.jsonl"]


def test_its_reward_pays_for_the_working(made: Path):
    """Promise: full marks for a right answer with all steps, half without, none for a wrong one; the line of
    its docstring is true."""
    score = runpy.run_path(str(made / "rewards.py"))["score"]

    def reward(response: str, answer: object = "91") -> float:
        return score(prompt="12+79=", response=response, row={"answer": answer})["reward"]

    responses = ("2+9+0=11;1+7+1=091;>91", ">91", "2+9+0=11;1+7+1=091;>92", "", "91;;>")
    assert [reward(response) for response in responses] == [1, 0.5, 0, 0, 0]
    assert reward(">91", 91) == 0.5  # one's own file may have numbers
    line = re.search(r"python -c '(.*)'", (made / "rewards.py").read_text())[1]
    module = type("Module", (), {"score": staticmethod(score)})
    assert eval(line.split("print")[1], {"rewards": module})["reward"] == 0.5


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Promise: a folder with anything in it, a file, or the current folder is refused and stays as it was; an
    empty one is filled."""
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir(), empty.mkdir()
    (full / ".hidden").write_text("mine")
    file.write_text("mine")
    for target in (full, file):
        with pytest.raises(LaminarError, match="it exists and is not an empty folder; name a new one"):
            project.make(target)
    monkeypatch.chdir(empty)
    with pytest.raises(LaminarError, match="the current folder"):
        project.make(Path("."))
    monkeypatch.chdir(tmp_path)
    project.make(Path("empty"))
    project.make(Path("not/yet/there"))
    assert (empty / "rewards.py").exists() and (tmp_path / "not/yet/there/model/model.safetensors").exists()
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full", "not"]
        and file.read_text() == "mine"
    )
    assert [p.name for p in full.iterdir()] == [".hidden"]


def test_it_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Promise: an error on the way (here: the example's model is not there) leaves nothing, neither in its
    place nor beside it."""
    monkeypatch.setattr(project, "shipped_directory", lambda name: tmp_path / "gone" / name)
    with pytest.raises(LaminarError, match="it cannot be written"):
        project.make(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--force"]])
def test_wrong_words_show_the_usage(words: list[str]):
    """Promise: one line with the usage."""
    with pytest.raises(LaminarError, match="usage: laminar init DIR"):
        cli.run(["init", *words])


@pytest.mark.slow
def test_it_trains(tmp_path: Path):
    """Promise: `laminar init DIR && cd DIR && laminar train ...` trains on real parts: exit code 0, rewards
    from its own function, a sample after each step, a report."""
    subprocess.run([*COMMAND, "init", "mine"], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    command = [*COMMAND, "train", "--config-dir", "conf", "experiment=mine", "steps=3"]
    done = subprocess.run(
        command, cwd=tmp_path / "mine", capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert (
        sum(line.startswith("step ") for line in lines)
        == sum(line.startswith("sample ") for line in lines)
        == 3
    )
    steps = [
        json.loads(line)
        for line in (tmp_path / "mine/runs/mine/metrics.jsonl").read_text().splitlines()
        if '"kind":"step"' in line
    ]
    assert len(steps) == 3 and all(step["reward_mean"] > 0 for step in steps)
    assert (tmp_path / "mine/runs/mine/report.html").exists()
