"""A run that is started again: complete, live, with a damaged store, after a death, on a full disk. Real
processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers import checkpoint_files
from helpers.runs import SHORT, Run, consumed, metrics, summary
from laminar_hpc.line.agent_line import PERMANENT
from laminar_hpc.machine.locks.lock_owner import read_owner
from laminar_hpc.machine.locks.run_lock import LOCK_FILE

MAIN = [sys.executable, "-m", "laminar_hpc"]
TRAIN = [sys.executable, "-m", "laminar_hpc.launch.cli", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
TORCHRUN += ["--nproc-per-node=4"]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # as torchrun starts the one rank of a role


def holder_of(run_dir: Path) -> tuple[int, float]:
    """Its process, and since when; the token changes when it renews its lock late."""
    record = read_owner(run_dir / LOCK_FILE)
    assert record
    return record[0].pid, record[0].since


def words(run_dir: Path, *more: str) -> list[str]:
    return [*SHORT, f"run_dir={run_dir}", *more]


def start(command: list[str], run_dir: Path, *more: str) -> tuple[list[str], int, float]:
    """(lines, exit code, seconds) of a start that ends by itself."""
    begun = time.monotonic()
    done = subprocess.run(
        [*command, *words(run_dir, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(ALONE if command == MAIN else {})},
    )
    return done.stdout.strip().splitlines(), done.returncode, time.monotonic() - begun


@contextlib.contextmanager
def controller(run_dir: Path, *more: str, log: Path) -> Iterator[subprocess.Popen]:
    """A live controller that waits for its workers, until the block ends; its console goes to `log`."""
    with open(log, "wb") as file:
        command = [*MAIN, *words(run_dir, "role=controller", *more)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **ALONE})
    try:
        wait_for(lambda: address_pid(run_dir) == process.pid, process)
        yield process
    finally:
        process.kill()
        process.wait()


def address_pid(run_dir: Path) -> int:
    """Of the controller that the workers would join."""
    path = run_dir / "controller.json"
    return json.loads(path.read_text())["pid"] if path.exists() else 0


def wait_for(condition, process: subprocess.Popen, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def complete(run_dir: Path, step: int) -> None:
    """The files of a run that was trained and evaluated to `step`, and died before its summary."""
    checkpoint_files.write(run_dir, step)
    after = {"kind": "evaluation", "label": "after", "file": "heldout", "step": step, "accuracy": 0.9}
    names = [{**after, "name": name} for name in ("greedy", "sampled")]
    records = [{"kind": "start", "restored_step": -1}, *names]
    text = "\n".join(json.dumps({"time": 1.0, **record}, separators=(",", ":")) for record in records)
    (run_dir / "metrics.jsonl").write_text(text + "\n")


# ---- complete ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["all", "controller", "trainer"])
def test_a_complete_run_ends_at_once_with_0(tmp_path, role):
    """Promise: `laminar train` and a role of its own exit 0 without waiting for anybody; the first and the
    controller say why. Summary and report are written if a death kept them away."""
    complete(tmp_path, 4)
    command = TRAIN if role == "all" else MAIN
    lines, code, seconds = start(
        command, tmp_path, "steps=4", "resume=auto", *([] if role == "all" else [f"role={role}"])
    )
    assert code == 0 and seconds < 20, lines  # a second or two; the machine may be busy
    if role in ("all", "controller"):
        assert lines[-1].startswith(f"done         {tmp_path} is complete at step 4; raise steps"), lines
        assert "writing them now" in lines[0] and summary(tmp_path)["accuracy_after"] == 0.9
        assert (tmp_path / "report.html").exists()
    else:
        assert lines == []


@pytest.mark.slow
def test_a_complete_run_under_torchrun(tmp_path):
    """Promise: of a bare torchrun every rank ends with 0, and one of them says why."""
    complete(tmp_path, 4)
    lines, code, _ = start([*TORCHRUN, "-m", "laminar_hpc"], tmp_path, "steps=4", "resume=auto")
    assert code == 0 and [line for line in lines if line.startswith("done ")][-1].endswith(
        "choose another run_dir"
    )


# ---- live --------------------------------------------------------------------------------------------------


def test_a_live_run_is_left_alone(tmp_path):
    """Promise: a second start exits with 2 and names the live run, of which not a file is moved or
    changed."""
    run_dir = tmp_path / "run"
    with controller(run_dir, f"store_dir={tmp_path}/stores", log=tmp_path / "log") as live:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "status.json").exists(), live)
        kept = [run_dir / name for name in ("metrics.jsonl", "controller.json")]
        before, holder = [path.read_bytes() for path in kept], holder_of(run_dir)
        for resume in ("auto", "never"):
            lines, code, seconds = start(TRAIN, run_dir, f"resume={resume}", f"store_dir={tmp_path}/stores")
            assert code == 2 and len(lines) == 1 and seconds < 20, lines
            assert f"{run_dir} is in use by a live run (pid {live.pid} of " in lines[0]
        other = start(TRAIN, tmp_path / "elsewhere" / "run", f"store_dir={tmp_path}/stores")
        assert other[1] == 2 and f"{tmp_path}/stores/run is in use" in other[0][0], (
            "its store is not touched either"
        )
        assert [path.read_bytes() for path in kept] == before and live.poll() is None
        assert holder_of(run_dir) == holder
        assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run", "stores"]
        live.send_signal(signal.SIGTERM)
        assert live.wait(60) == 0
    assert not (run_dir / LOCK_FILE).exists()


def test_two_starts_at_the_same_moment(tmp_path):
    """Promise: of two controllers started together one runs and the other exits with 2; the winner keeps its
    address. Killed, it holds nobody up: the next start takes the lock over and says whose it was."""
    run_dir = tmp_path / "run"
    command, environment = [*MAIN, *words(run_dir, "role=controller")], {**os.environ, **ALONE}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while all(process.poll() is None for process in both) and time.monotonic() < deadline:
            time.sleep(0.05)
        loser, winner = sorted(both, key=lambda process: process.poll() is None)
        assert loser.returncode == 2 and b"is in use by a live run" in loser.stdout.read()
        wait_for(lambda: address_pid(run_dir) == winner.pid, winner)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    finally:
        for process in both:
            process.kill()
            process.wait()
    with controller(run_dir, "resume=auto", log=tmp_path / "log"):
        said = (tmp_path / "log").read_text()
        assert f"the lock of a process that is gone was taken over (pid {winner.pid} of " in said


# ---- store and disk ----------------------------------------------------------------------------------------


def test_a_damaged_store_is_refused(tmp_path):
    """Promise: `laminar train` and the controller exit with 2 and one line; the file stays as it is."""
    complete(tmp_path, 2)
    (tmp_path / "store.sqlite").write_bytes(b"no database" * 1000)
    for command, role in ((TRAIN, "all"), (MAIN, "controller")):
        lines, code, _ = start(command, tmp_path, "steps=4", "resume=auto", f"role={role}")
        errors = [line for line in lines if line.startswith("laminar: error: ")]
        assert code == 2 and len(errors) == 1 and lines[-1] == errors[0], lines
        assert (
            f"{tmp_path}/store.sqlite is damaged (file is not a database); nothing was changed: restore it"
            in errors[0]
        )
        assert (tmp_path / "store.sqlite").read_bytes() == b"no database" * 1000
        assert not (tmp_path / LOCK_FILE).exists()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leaves not a byte."""
    with open(folder / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


root = pytest.mark.skipif(os.getuid() != 0, reason="a small disk is mounted, which takes root")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_restarts_a_run(tmp_path):
    """Promise: with --max-restarts the run goes on from its checkpoint instead of moving itself aside, and
    says why."""
    run_dir = tmp_path / "run"
    command = [*TORCHRUN, "--max-restarts=2", "-m", "laminar_hpc"]
    with open(tmp_path / "log", "wb") as file:
        more = words(run_dir, "steps=4", "checkpoint.every=1")
        process = subprocess.Popen([*command, *more], stdout=file, stderr=file)
    try:
        wait_for(lambda: (run_dir / "checkpoints" / "step_000002").exists(), process, 150)
        for rank in psutil.Process(process.pid).children():
            if rank.environ()["RANK"] == "2":  # the relay
                rank.kill()
        assert process.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        process.terminate()
        process.wait()
    said = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("restart ")]
    assert len(said) == 1 and "by torchrun: relay 0 (pid " in said[0], (tmp_path / "log").read_text()
    assert summary(run_dir)["restarts"] == 1 and summary(run_dir)["steps"] == 4
    assert sorted(consumed(run_dir)) == [0, 1, 2, 3] and not (tmp_path / "run.1").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@root
def test_a_disk_that_fills_up_while_training(small_disk, tmp_path):
    """Promise: `laminar train` ends with exit code 1 and one line as its last, makes no restart, and the same
    command goes on when there is room."""
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    run_dir = small_disk / "run"
    run = Run(run_dir, "steps=500", "checkpoint.every=1", "restarts=3")
    run.read_until("step   2/500")
    fill(small_disk)
    assert run.finish() == 1
    assert (
        len(run.errors) == 1 and run.lines[-1] == run.errors[0] and "Traceback" not in "".join(run.lines)
    ), run.lines
    assert "no room on the disk of" in run.errors[0]
    run.assert_gone()
    (small_disk / "filler").unlink()
    run = Run(run_dir, "steps=500", "checkpoint.every=1", "resume=auto")
    restored = int(run.read_until("going on from the checkpoint of step ").split()[-1])
    run.read_until(f"step {restored + 1:>3}/500")
    run.stop(signal.SIGTERM)
    assert run.finish() == 0, run.lines


@root
def test_a_full_disk_is_one_line(small_disk, tmp_path):
    """Promise: the line names the disk and the cure, no traceback follows it on the console, nothing hangs,
    and what was committed is whole."""
    run_dir = small_disk / "run"
    with controller(run_dir, log=tmp_path / "console") as live:
        wait_for(lambda: (run_dir / "status.json").exists(), live)
        fill(small_disk)
        live.send_signal(signal.SIGTERM)  # the next line of its metrics finds no room
        assert live.wait(60) == PERMANENT
    lines = (tmp_path / "console").read_text().splitlines()
    errors = [line for line in lines if "error" in line]
    assert len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in "".join(lines), lines
    assert f"no room on the disk of run_dir={run_dir} (0 B left): make room, then go on with" in errors[0]
    (small_disk / "filler").unlink()
    with controller(run_dir, "resume=auto", log=tmp_path / "again"):
        assert metrics(run_dir, "start")


@pytest.mark.slow
@pytest.mark.timeout(200)
@root
def test_a_full_disk_is_waited_for_where_the_roles_are_apart(small_disk, tmp_path):
    """Promise: the controller ends without a word to the others, who wait for it, and is started again when
    there is room."""
    run_dir, log = small_disk / "run", tmp_path / "console"

    def launch(role: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "laminar_hpc.launch.launch_role", role, "1", *words(run_dir)]
        with open(log, "ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file)

    launched = [launch("controller")]
    try:
        wait_for(lambda: (run_dir / "status.json").exists(), launched[0])
        first = address_pid(run_dir)
        fill(small_disk)
        launched.append(launch("relay"))  # the controller has no room for the first that it hears of it
        waits = b"waits        controller: controller 0: no room on the disk of run_dir="
        wait_for(lambda: waits in log.read_bytes(), launched[0])
        assert address_pid(run_dir) == first and not metrics(run_dir, "end")
        (small_disk / "filler").unlink()
        wait_for(lambda: len(metrics(run_dir, "start")) == 2, launched[0])
        assert address_pid(run_dir) != first and launched[1].poll() is None
    finally:
        for each in reversed(launched):
            each.terminate()
            each.wait(60)
