"""`--config-dir DIR`: a user's own configurations beside conf/, with the meaning of Hydra's own flag."""

import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.options import take_config_dir, with_absolute_config_dir

MINE = "# @package _global_\nsteps: 7\ndefaults:\n  - override /pipeline: mine\n"


@pytest.fixture
def folder(tmp_path):
    """With characters that Hydra's grammar and a shell take apart."""
    made = tmp_path / "a, b'(1) $x={y}\""
    (made / "experiment").mkdir(parents=True)
    (made / "pipeline").mkdir()
    (made / "experiment" / "mine.yaml").write_text(MINE)
    (made / "experiment" / "demo.yaml").write_text(MINE)
    (made / "pipeline" / "mine.yaml").write_text("name: mine\nmax_staleness: 5\n")
    return made


def test_both_spellings_anywhere_among_the_words(folder):
    """Promise: its experiments and its other groups are found, and words of the command line go before
    both."""
    for words in (
        ["--config-dir", str(folder), "experiment=mine"],
        ["experiment=mine", f"--config-dir={folder}"],
    ):
        config = load_config([*words, "seed=3"])
        assert (config.steps, config.pipeline.max_staleness, config.pipeline.name, config.seed) == (
            7,
            5,
            "mine",
            3,
        )
    assert load_config([f"--config-dir={folder}", "pipeline=sync"]).pipeline.max_staleness == 0, (
        "conf/ is still there"
    )


@pytest.mark.parametrize(
    ("key", "nested"),
    [("model.path", "model: {path: VALUE}"), ("model.lora.rank", "model: {lora: {rank: VALUE}}")],
)
def test_a_key_with_dots_is_answered_with_sections(folder, key, nested):
    """Promise: whoever writes a key of the command line into a file is told how a file has it."""
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{key}: 1\n")
    with pytest.raises(LaminarError) as error:
        load_config(["--config-dir", str(folder), "experiment=mine"])
    assert str(error.value) == f"experiment=mine: {key}: a file has sections, not dots; write {nested}"


def test_a_name_that_both_folders_have_is_confs(folder):
    """Promise: Hydra's precedence, as documented."""
    assert load_config([f"--config-dir={folder}", "experiment=demo"]).steps == 30


def test_the_folder_becomes_absolute_for_other_processes(folder, monkeypatch):
    """--config-dir reaches other processes as an absolute path, in front."""
    monkeypatch.chdir(folder.parent)
    assert with_absolute_config_dir(["a=1", "--config-dir", folder.name]) == [f"--config-dir={folder}", "a=1"]
    assert with_absolute_config_dir(["a=1"]) == ["a=1"] and take_config_dir([]) == (None, [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--config-dir"], "no folder given; write --config-dir DIR"),
        (["--config-dir="], "no folder given"),
        (["--config-dir=/nowhere"], "--config-dir=/nowhere: no such folder"),
        (["--config-dir=a", "--config-dir=b"], "one folder, not 2"),
        (
            ["--config-dir={empty}"],
            "no group of configurations in it; write --config-dir DIR, where DIR holds experiment/NAME.yaml",
        ),
        (["--config-dir={loose}"], r"move own.yaml to .*loose/experiment/own.yaml"),
        (["--config-dir={folder}", "experiment=yours"], "experiment=yours: use one of .*mine"),
    ],
)
def test_a_wrong_folder_is_refused_in_one_line(words, text, folder, tmp_path):
    """A --config-dir that is missing, empty or without groups is refused with the reason."""
    for name in ("empty", "loose"):
        (tmp_path / name).mkdir()
    (tmp_path / "loose" / "own.yaml").write_text("steps: 1\n")
    places = {"{empty}": tmp_path / "empty", "{loose}": tmp_path / "loose", "{folder}": folder}
    for key, place in places.items():
        words = [word.replace(key, str(place)) for word in words]
    with pytest.raises(LaminarError, match=text):
        load_config(words)


def test_ranks_of_torchrun_take_the_same_words(folder, tmp_path):
    """Promise: what `laminar train` takes, a bare `-m laminar_hpc` takes too: a controller's dry run of the
    user's experiment."""
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    words = [
        "role=controller",
        f"run_dir={tmp_path}/run",
        "--config-dir",
        folder.name,
        "experiment=mine",
        "dry_run=true",
        "model.path=Qwen/Qwen2.5-7B",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "laminar_hpc", *words],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "at most 5 steps stale" in done.stdout
