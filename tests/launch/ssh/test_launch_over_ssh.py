"""`laminar launch`, and torchrun by hand as docs/hosts.md has it, on two machines with real sshds: network
namespaces, with processes, host names and shared memory of their own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.machines import Machines
from helpers.paths import ROOT
from helpers.runs import assert_clean, steps_done
from laminar_hpc.line.join_key import read_join_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SMALL = ["experiment=demo", "sampling.max_response_tokens=48", "evaluation.problems=32"]
RUN_SECONDS = 500


def wait_for(condition: Callable[[], object], what: str, out: Path) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}; the launcher said: {out.read_text()[-3000:]}"
        time.sleep(0.2)


def check_end(run_dir: Path, steps: int) -> None:
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps
    assert_clean(run_dir)
    assert not list((run_dir / "jobs").glob("launch.*"))


def test_a_run_on_two_machines_is_stopped_and_goes_on(two: Machines, tmp_path: Path) -> None:
    """docs/promises.md#over-ssh: one command trains on two machines and shows the steps; Ctrl-C ends all
    of it in order with a checkpoint, the same command with resume=auto trains the rest; no process is left,
    no secret was in a command line."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = [*SMALL, f"run_dir={run_dir}", "checkpoint.every=100"]
    first = two.launch(out, *words, "steps=1000", WANDB_API_KEY="a-secret")
    wait_for(lambda: "step    2/" in out.read_text() or first.poll() is not None, "a second step", out)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(f"run_dir={run_dir}".encode() in line for line in lines)
    assert not [line for line in lines if b"a-secret" in line]
    first.send_signal(signal.SIGINT)
    assert first.wait(RUN_SECONDS) == 0, out.read_text()
    trained = steps_done(run_dir)
    assert f"step_{trained:06d}" in os.listdir(run_dir / "checkpoints")
    assert not two.processes(run_dir)
    (run_dir / "checkpoints" / f"step_{trained:06d}" / "signature.json").unlink()
    more = [*words, f"steps={trained + 2}", "resume=auto"]
    assert two.launch(out, *more).wait(200) == 2 and "is not signed: name the key" in out.read_text()
    second = two.launch(out, *more, "checkpoint.unsigned=true")
    assert second.wait(RUN_SECONDS) == 0, out.read_text()
    check_end(run_dir, trained + 2)
    assert not two.processes(run_dir)


def test_a_machine_and_the_launcher_are_lost(two: Machines, tmp_path: Path) -> None:
    """docs/promises.md#over-ssh: the machine of the replica loses its power; that is said, and it begins
    again with --only in the run that goes on. The launchers die, and the run goes on to its end."""
    run_dir, out, again = tmp_path / "run", tmp_path / "out", tmp_path / "again"
    words = [*SMALL, f"run_dir={run_dir}", "steps=40"]
    first = two.launch(out, *words)
    wait_for(lambda: steps_done(run_dir) >= 2, "two steps", out)
    two.off("m2")
    wait_for(
        lambda: "m2 is gone, or the connection to it: the run goes on" in out.read_text(), "the line", out
    )
    assert first.poll() is None
    two.network.mend(2)
    two.on("m2")
    before = steps_done(run_dir)
    second = two.launch(again, *words, "--only=m2")
    wait_for(lambda: steps_done(run_dir) >= before + 6, "more steps", again)
    for launcher in (first, second):
        launcher.kill()
        launcher.wait()
    assert steps_done(run_dir) < 40
    wait_for(lambda: (run_dir / "summary.json").exists() and not two.processes(run_dir), "the end", out)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 40
    assert_clean(run_dir)
    assert "step 40/40" in (run_dir / "logs" / "host-m1.log").read_text()


def hide(folder: Path, typed: Path) -> str:
    """A line of shell by which a machine finds `folder` empty, but for the one where it is typed."""
    return f"mount -t tmpfs tmpfs {folder} && mkdir {typed}"


def test_a_machine_that_sees_no_folder_of_the_run(two: Machines, tmp_path: Path, monkeypatch) -> None:
    """docs/promises.md#over-ssh: one command puts the replica on a machine where the folders of the run and
    the terminal are empty. The key is in no command line, no environment and no output; the log there is read
    here, its trace is in the run's folder, and no key stays there."""
    run_dir, out, typed = tmp_path / "run", tmp_path / "out", tmp_path / "typed"
    typed.mkdir()
    monkeypatch.chdir(typed)
    two.run("m2", hide(tmp_path, typed))
    words = [*SMALL, f"run_dir={run_dir}", "cluster.storage=stream", "steps=4"]
    launcher = two.launch(out, *words)
    wait_for(lambda: "step 1/4" in out.read_text() or launcher.poll() is not None, "a step", out)
    key = read_join_key(run_dir / "join.key")
    laminar = [sys.executable, "-m", "laminar_hpc.launch.cli", "logs", str(run_dir)]
    with open(tmp_path / "log", "w") as file:
        asked = two.on_login_node(*laminar, "rollout-0", stdout=file, stderr=file)
    processes = [path for path in Path("/proc").glob("[0-9]*")]
    for path in [file for folder in processes for file in (folder / "cmdline", folder / "environ")]:
        with contextlib.suppress(OSError):
            assert key.client_secret.encode() not in path.read_bytes(), path
    assert asked.wait(60) == 0 and (tmp_path / "log").read_text().strip()
    assert launcher.wait(RUN_SECONDS) == 0, out.read_text()
    check_end(run_dir, 4)
    assert key.client_secret not in out.read_text()
    assert "m2: joined       relay, rollout; logs in " in out.read_text()
    assert not (run_dir / "logs" / "rollout0.log").exists()
    assert '"generate"' in (run_dir / "trace" / "rollout0.jsonl").read_text()
    assert len(list((run_dir / "trace").glob("relay*.jsonl"))) == 2, "one here, one there"
    assert not two.processes(typed / "runs")
    left = two.run("m2", f"cd {typed}/runs/joined-run-* && ls && ls logs").split()
    assert "trace" in left and "rollout0.log" in left and not [name for name in left if "key" in name]


def test_a_machine_without_the_folder_is_lost_and_the_run_goes_on(
    two: Machines, tmp_path: Path, monkeypatch
) -> None:
    """It loses its power and joins again by --only, with the key of the run that goes on; Ctrl-C ends all in
    order, and the same command with resume=auto hands over the key of its own controller."""
    run_dir, typed = tmp_path / "run", tmp_path / "typed"
    out, again, more = tmp_path / "out", tmp_path / "again", tmp_path / "more"
    typed.mkdir()
    monkeypatch.chdir(typed)
    two.run("m2", hide(tmp_path, typed))
    words = [*SMALL, f"run_dir={run_dir}", "cluster.storage=stream"]
    first = two.launch(out, *words, "steps=1000")
    wait_for(lambda: steps_done(run_dir) >= 1, "a step", out)
    two.off("m2")
    wait_for(
        lambda: "m2 is gone, or the connection to it: the run goes on" in out.read_text(), "the line", out
    )
    two.network.mend(2)
    two.on("m2")
    two.run("m2", hide(tmp_path, typed))
    second = two.launch(again, *words, "steps=1000", "--only=m2")
    wait_for(lambda: "m2: joined       relay, rollout" in again.read_text(), "it to join", again)
    before = steps_done(run_dir)
    wait_for(lambda: steps_done(run_dir) >= before + 2, "more steps", again)
    first.send_signal(signal.SIGINT)
    assert first.wait(RUN_SECONDS) == 1, out.read_text()  # as it has lost a machine
    assert second.wait(RUN_SECONDS) == 0, again.read_text()
    trained = steps_done(run_dir)
    last = two.launch(more, *words, f"steps={trained + 2}", "resume=auto")
    assert last.wait(RUN_SECONDS) == 0, more.read_text()
    check_end(run_dir, trained + 2)
    assert not two.processes(run_dir) and not two.processes(typed / "runs")


def test_machines_that_cannot_begin(two: Machines, tmp_path: Path) -> None:
    """One that ssh does not reach, and one without Python: said with the machine's name, and nothing is left
    on the other."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = [*SMALL, f"run_dir={run_dir}"]
    assert two.launch(out, *words, VENV="/nowhere").wait(120) == 1
    assert "m2 has no Python where this machine has it: VENV= names another" in out.read_text()
    two.off("m2")
    assert two.launch(out, *words).wait(120) == 1
    assert "m2: ssh could not start its part" in out.read_text()
    assert not two.processes(run_dir)


def by_hand(prompt: str) -> list[tuple[str, str]]:
    """(machine, line) of the lines of docs/hosts.md that start so, with their continuations."""
    text = (ROOT / "docs" / "hosts.md").read_text().replace("\\\n", " ")
    found = re.findall(rf"^10\.0\.0\.([12])\$ ({prompt}.*?)&?$", text, re.M)
    return [(f"m{number}", line) for number, line in found]


@pytest.mark.parametrize(("prompt", "count"), [("GLOO_SOCKET_IFNAME", 2), ("launch/", 4)])
def test_torchrun_by_hand(prompt: str, count: int, two: Machines, tmp_path: Path) -> None:
    """The lines of docs/hosts.md, typed on their machines, train to the end."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    lines = by_hand(prompt)
    assert len(lines) == count
    processes = []
    with open(out, "w") as file:
        for machine, line in lines:
            for number in (1, 2):
                line = line.replace(f"10.0.0.{number}", two.address(f"m{number}"))
            line = " ".join([line.replace("/shared/runs/a", str(run_dir)), *SMALL[1:], "steps=3"])
            folder = Path(sys.executable).parent
            remote = f"cd {ROOT} && export PATH={folder}:$PATH OMP_NUM_THREADS=1 && {line}"
            command = ["ssh", "-F", str(two.config), machine, remote]
            processes.append(two.on_login_node(*command, stdout=file, stderr=subprocess.STDOUT))
    assert [process.wait(RUN_SECONDS) for process in processes] == [0] * count, out.read_text()[-3000:]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    assert_clean(run_dir)
