"""What a user does wrong, or what dies: one line with cause and cure, a non-zero exit, nothing left
behind."""

import json
import math
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.runs import Run
from laminar_hpc.config.directories import examples_directory


def train(*words, seconds=60):
    """stderr lines and exit code of a `laminar train` that is to be refused."""
    done = subprocess.run(
        [sys.executable, "-m", "laminar_hpc.launch.cli", "train", *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.stderr.strip().splitlines(), done.returncode


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("stepz=1", "stepz: no such key (did you mean steps?)"),
        ("model.path=/nowhere", "no config.json there"),
        ("algorithm.minibatches_per_step=7", "do not divide"),
        ("relay.shm_dir=/nowhere", "no such folder"),
    ],
)
def test_refused_before_anything_starts(tmp_path, word, cause):
    """A wrong combination ends with one line and code 2, and nothing is written."""
    lines, code = train("experiment=demo", f"run_dir={tmp_path}/run", word)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("laminar: error: ") and cause in lines[0]
    assert not (tmp_path / "run").exists(), "nothing is written for a run that never began"


def test_port_in_use(tmp_path):
    """A controller's port in use ends with one line and code 2."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        lines, code = train(
            "experiment=demo", f"run_dir={tmp_path}/run", f"cluster.port={other.getsockname()[1]}"
        )
    assert code == 2 and len(lines) == 1 and "choose another, or 0" in lines[0]


def test_a_world_of_the_wrong_size():
    """The bare torchrun line with too few ranks: one line with the right number."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=3",
        "-m",
        "laminar_hpc",
        "experiment=demo",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("laminar: error:")]
    assert done.returncode != 0 and len(errors) == 1 and "start 4 ranks per node" in errors[0]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_nan_in_the_model_ends_the_run_as_soon_as_it_is_read(tmp_path):
    """One line that names the tensor, once, and everybody leaves within seconds of it; no step, no
    checkpoint."""
    model = tmp_path / "model"
    shutil.copytree(examples_directory("arithmetic/base"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 5] = math.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    run = Run(tmp_path / "run", f"model.path={model}")
    run.read_until("laminar: error:")
    assert run.finish(25) == 1
    assert len(run.errors) == 1 and "trainer 0" in run.errors[0], run.errors
    assert (
        "model.layers.1.mlp.down_proj.weight (1 of 32,768 values, the first at [0, 5]) is NaN or infinite"
        in run.errors[0]
    )
    assert not (tmp_path / "run/checkpoints").exists() and not any("step   1" in line for line in run.lines)
    run.assert_gone()


def test_a_row_without_its_field_ends_the_run_with_file_and_row(tmp_path):
    """Promise: also one far down in the file, which only the controller reads, is refused before engines have
    work: exit code 2."""
    rows = Path(examples_directory("arithmetic/data/train.jsonl")).read_text().splitlines()
    rows[700] = json.dumps({"question": "1+1="})
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    run = Run(tmp_path / "run", f"data.train={tmp_path}/rows.jsonl")
    assert run.finish() == 2
    assert (
        len(run.errors) == 1
        and "error: " in run.errors[0]
        and "rows.jsonl, row 701: no field 'prompt'" in run.errors[0]
    ), run.lines
    run.assert_gone()


@pytest.mark.slow
def test_a_model_whose_weights_are_cut_off(tmp_path):
    """A truncated weights file ends the run with one error that names the file; nothing stays behind."""
    shutil.copytree(examples_directory("arithmetic/base"), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    run = Run(tmp_path / "run", f"model.path={tmp_path}/model")
    assert run.finish() != 0
    assert len(run.errors) == 1 and "model.safetensors" in run.errors[0], run.lines
    run.assert_gone()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["engine", "controller", "rollout", "trainer"])
def test_a_death_ends_the_run_in_order(tmp_path, who):
    """Killed with SIGKILL while training: every process is gone within 20 s, shared memory is clean, one line
    names who died.

    An engine killed in the middle of a pull is started again from the slot and the run goes on; then it is
    killed once more.
    """
    run = Run(tmp_path / f"run-{who}", "steps=500")
    run.read_until("step   2/500")
    run.members()
    for _ in range(5):
        victim = run.engine() if who == "engine" else run.rank(who)
        victim.kill()
        died = time.monotonic()
        if who != "engine" or not run.has_another_engine(than=victim, seconds=20):
            break
        run.read_next("step ")
    assert run.finish() == 1
    assert time.monotonic() - died < 20
    assert len(run.errors) == 1 and who in run.errors[0], run.lines
    run.assert_gone()
