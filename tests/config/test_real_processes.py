"""Refusals and help as a user sees them, from real processes; who speaks when all ranks see an error."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.stand_ins import STAND_IN
from laminar_hpc import __main__ as rank_main
from laminar_hpc import __version__
from laminar_hpc.config.load import load_config
from laminar_hpc.launch import cli, ranks
from laminar_hpc.launch.launch import NodeAgent
from laminar_hpc.launch.supervisor import WholeRun


def laminar(*words: str, **environment: str) -> tuple[list[str], list[str], int]:
    """Lines of stdout and of stderr, and the exit code, of a real process."""
    command = [sys.executable, "-m", "laminar_hpc.launch.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines(), done.stderr.splitlines(), done.returncode


def test_a_refusal_as_seen_from_a_shell(tmp_path):
    """Promise: one line per mistake on stderr, nothing else, exit code 2, nothing written."""
    out, err, code = laminar(
        "train", "experiment=demo", f"run_dir={tmp_path}/run", "steps=0", "stepz=1", "optimizer.lr=nan"
    )
    assert (
        (out, code) == ([], 2) and len(err) == 3 and all(line.startswith("laminar: error: ") for line in err)
    )
    assert not (tmp_path / "run").exists()


def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, tmp_path):
    """Promise: a file or folder that cannot be used, whichever command comes upon it, is one line that names
    it, with exit code 2. A name that is too long is refused to root too."""
    long = f"{tmp_path}/{'x' * 300}"
    for words in (
        ["train", "experiment=demo", "dry_run=true", f"data.train={long}"],
        ["train", "experiment=demo", "dry_run=true", f"model.path={long}"],
        ["train", "experiment=demo", f"source=replay:{long}"],
        ["train", f"--config-dir={long}", "experiment=mine"],
        *([command, long] for command in ("report", "top", "audit", "sim", "plan")),
        ["export", long, "--out", f"{tmp_path}/out"],
    ):
        monkeypatch.setattr(sys, "argv", ["laminar", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and line.startswith("laminar: error: ") and long in line


def test_help_and_version():
    """Promise: help is help (stdout, exit code 0), for the whole and for every command; so is the version."""
    assert laminar("--version") == ([f"laminar {__version__}"], [], 0)
    out, err, code = laminar("train", "--help")
    assert (err, code) == ([], 0) and out[0].startswith(
        "usage: laminar train [key=value ...] [--config-dir DIR]"
    )
    for part in (
        "experiment=demo",
        "docs/configuration.md",
        "pipeline=laminar|",
        "'data.train=my file.jsonl'",
    ):
        assert part in "\n".join(out)
    for words in (
        ["--help"],
        ["help"],
        ["-h"],
        *([name, "--help"] for name in cli.COMMANDS),
        *(["help", name] for name in cli.COMMANDS),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert cli.run(words) == 0
        assert shown.getvalue().startswith(
            f"usage: laminar {words[-1] if words[0] == 'help' and words[1:] else ''}".rstrip()
        )


def test_a_refusal_waits_for_no_library():
    """Promise: what makes a start slow is not imported to refuse one."""
    code = """
import json, sys
import pytest

from laminar_hpc.launch import cli
try:
    cli.run(["train", "experiment=demo", "steps=0"])
except cli.LaminarError:
    slow = {"torch", "pyarrow", "datasets", "wandb", "transformers", "sglang", "numpy", "zmq", "rich"}
    print(json.dumps(sorted(slow & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []


def test_torchrun_without_us_refuses_alike():
    """Promise: a rank that torchrun started by itself refuses a setting as `laminar train` does: no
    traceback, exit code 2."""
    command = [
        sys.executable,
        "-m",
        "laminar_hpc",
        "experiment=demo",
        "algorithm.minibatches_per_step=0",
        "stepz=1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parent
    )
    lines = done.stderr.splitlines()
    assert (
        done.returncode == 2
        and len(lines) == 2
        and all(line.startswith("laminar: error: refused: ") for line in lines)
    )


SPEAKS = """import os, sys
from laminar_hpc.line.agent_line import RankReport, report
refused = sys.argv[1] == "refused"
report(RankReport("a.jsonl, row 701: no field" if refused else "the trainer died", refused))
report(RankReport("trainer 0: told to end"))
sys.exit(1)"""


def test_what_the_controller_refuses_ends_laminar_train_with_2(tmp_path, monkeypatch, capfd):
    """Promise: a refusal that only a rank can give, far down in a data file, has exit code 2 too; others have
    1."""
    monkeypatch.setattr(ranks, "_RANK", STAND_IN)
    config = load_config(["experiment=demo", f"run_dir={tmp_path}/run"])
    for word, text, code in (("refused", "a.jsonl, row 701: no field", 2), ("fails", "the trainer died", 1)):
        group = WholeRun(config, [SPEAKS, word], 1)
        assert NodeAgent(tmp_path / "run", [group]).run() == code
        assert capfd.readouterr().err.splitlines() == [f"laminar: error: {text}"]


def blocks_term(pid: int) -> bool:
    """Whether a process keeps SIGTERM waiting."""
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(blocked, 16) & 1 << (signal.SIGTERM - 1))


def test_what_all_ranks_see_rank_0_says():
    """Promise: another rank says nothing and leaves with the same code as soon as torchrun signals it."""
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "laminar_hpc", "experiment=demo", "stepz=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 60
        while not blocks_term(process.pid):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        signalled = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert (said, process.returncode) == ("", 2)
    assert time.monotonic() - signalled < rank_main.SPEAK_SECONDS


def test_a_rank_that_nobody_signals_leaves_too(monkeypatch):
    """Promise: the wait for rank 0 is bounded."""
    monkeypatch.setattr(rank_main, "SPEAK_SECONDS", 0.01)
    mask, begun = signal.pthread_sigmask(signal.SIG_BLOCK, set()), time.monotonic()
    try:
        rank_main.wait_for_rank_0()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert 0.01 <= time.monotonic() - begun < 5
