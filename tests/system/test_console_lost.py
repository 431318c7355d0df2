"""A run whose console goes away (a closed pipe or terminal) stops in order, and its logs have the rest."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.runs import SHORT, assert_clean, metrics
from laminar_hpc.store import checkpoints

TRAIN = "laminar train"
LAMINAR = [sys.executable, "-m", "laminar_hpc.launch.cli", "train"]
# what generates does not matter here, and an emulated engine is there at once
EMULATED = ["rollout.engine=emulated", "emulation.median_response_tokens=20"]
WORDS = [*SHORT, "evaluation.files=[]", "algorithm.prompts_per_step=4", *EMULATED]


def read_until(descriptor: int, words: bytes) -> None:
    """What the console shows, as far as the line that holds `words`."""
    shown = b""
    while words not in shown:
        shown += os.read(descriptor, 1 << 16)


def take_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests themselves run under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def assert_stopped_in_order(process: subprocess.Popen[bytes], run_dir: Path, reason: str) -> None:
    assert process.wait(240) == 0
    end = metrics(run_dir, "end")[-1]
    assert end["reason"] == reason and end["step"] in checkpoints.steps(run_dir)
    assert_clean(run_dir)
    kept = (run_dir / "logs" / "console.log").read_text()
    assert f"stopping     {reason}" in kept and "done  " in kept and str(run_dir / "report.html") in kept


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_reader_of_a_pipe_ends_first(tmp_path):
    """Promise (docs/resuming.md): `laminar train ... | tee log` and Ctrl-C, of which tee dies first: the step
    is finished and a checkpoint written; what tee did not show is in logs/."""
    run_dir = tmp_path / "run"
    command = [*LAMINAR, *WORDS, f"run_dir={run_dir}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    read_until(process.stdout.fileno(), b"step  1/")
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert_stopped_in_order(process, run_dir, "SIGINT")
    assert run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "start", ["laminar train", pytest.param("launch/all_roles.sh", marks=pytest.mark.slow)]
)
def test_the_terminal_is_closed(start, tmp_path):
    """Promise (docs/resuming.md): a closed terminal, a lost ssh and `tmux kill-session` stop a run in order,
    with a checkpoint and nothing left in shared memory."""
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    command = [ROOT / start, run_dir] if "/" in start else [*LAMINAR, f"run_dir={run_dir}"]
    process = subprocess.Popen(
        [*command, *WORDS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    os.close(theirs)
    read_until(ours, b"step  1/")
    run_id = json.loads((run_dir / "controller.json").read_text())["run_id"]
    os.close(ours)
    reason = "SIGHUP" if start == TRAIN else "laminar stop"
    assert_stopped_in_order(process, run_dir, reason)
    assert not Path("/dev/shm", f"laminar-{run_id}").exists()
