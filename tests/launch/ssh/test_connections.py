"""Who is told what when a machine's part ends. The processes are stand-ins for ssh and what it starts: shell
scripts that take orders on their input; tests/launch/ssh/test_launch_over_ssh.py has the real ones."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from laminar_hpc.launch.ssh.connections import Launcher
from laminar_hpc.launch.ssh.hosts import Host, HostPart

CONTROLLER = HostPart(Host("n1", 0), controller=True)
TRAINERS = HostPart(Host("n2", 0), trainers=(0, 1))
REPLICAS = HostPart(Host("n3", 0), replicas=1)
BEGIN = "echo machine here;"
# begins, then ends in order by the first order that comes
OBEYS = f'{BEGIN} read word; echo "got $word"'


def launched(*scripts: tuple[HostPart, str]) -> Launcher:
    return Launcher([(part, ["bash", "-c", script]) for part, script in scripts])


def run(launcher: Launcher, go: Path) -> int:
    """Its exit code; `go` is made when all have begun."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launcher.run()))
    thread.start()
    while thread.is_alive():
        if launcher.begun:
            go.touch()
        thread.join(0.05)
    return codes[0]


@pytest.mark.parametrize(
    ("controller", "trainers", "replicas", "code", "said"),
    [
        ("{all} exit 0", "{all} exit 0", "{all} exit 0", 0, []),
        ("{all} exit 1", "{obeys}", "{obeys}", 1, ["n2: got leave", "n3: got leave"]),
        ("{obeys}", "{all} exit 1", "{all} exit 0", 1, ["got stop"]),
        ("{obeys}", "{all} exit 2", "{obeys}", 2, ["got leave", "n3: got leave"]),
        ("{all} ! read -t 2 word || echo wrong", "{all} exit 0", "{all} exit 1", 1, []),
        ("{all} ! read -t 2 word || echo wrong", "{all} exit 0", "{all} exit 255", 1, []),
        ("{obeys}", "{obeys}", "exit 255", 1, ["got leave", "n2: got leave"]),
    ],
)
def test_who_is_told_what(controller, trainers, replicas, code, said, tmp_path, capfd) -> None:
    """The table of launch/ssh/connections.py: a run ends in order where its trainers have failed, goes on
    where replicas or a connection have, and no process is left where it cannot go on or has not begun."""
    go = tmp_path / "go"
    all_begun = f"{BEGIN} while [ ! -e {go} ]; do sleep 0.05; done;"
    scripts = [text.format(all=all_begun, obeys=OBEYS) for text in (controller, trainers, replicas)]
    launcher = launched(*zip((CONTROLLER, TRAINERS, REPLICAS), scripts, strict=True))
    assert run(launcher, go) == code
    out = capfd.readouterr()
    assert sorted(line for line in out.out.splitlines() if "machine" not in line) == said
    lost = "n3 is gone, or the connection to it: the run goes on without its replicas"
    assert (lost in out.err) == (replicas.endswith("255") and "{all}" in replicas)
    assert ("n3: ssh could not start its part" in out.err) == (replicas == "exit 255")


def test_signals(tmp_path, capfd) -> None:
    """The first is a stop, told to the controller alone; the second tells all to leave; the third leaves them
    alone. Two at once are one."""
    now = [100.0]
    patient = f'{BEGIN} while read word; do echo "got $word"; done; exit 0'
    scripts = [(CONTROLLER, patient), (REPLICAS, patient)]
    launcher = Launcher([(part, ["bash", "-c", script]) for part, script in scripts], lambda: now[0])
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(launcher.run()))
    thread.start()
    while not launcher.begun:
        time.sleep(0.05)
    for _ in range(3):
        launcher.on_signal(signal.SIGINT)
        launcher.on_signal(signal.SIGINT)
        now[0] += 10
    thread.join(60)
    assert done == [1]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and "a checkpoint, then all processes end" in said[0]


def test_who_joins_gets_the_key_once_there_is_one(tmp_path, capfd) -> None:
    """As a line, once, and nobody else; the end of the controller is told behind it."""
    keys = iter(["", "", "the key"])
    joins = HostPart(Host("n3", 0), replicas=1, joins=True)
    reads = f'{BEGIN} while read word; do echo "got $word"; if [ "$word" = "$0" ]; then exit 0; fi; done'
    scripts = [
        (CONTROLLER, f"{BEGIN} sleep 1; exit 0"),
        (REPLICAS, f"{BEGIN} ! read -t 2 word || echo wrong"),
    ]
    commands = [
        *((part, ["bash", "-c", script]) for part, script in scripts),
        (joins, ["bash", "-c", reads, "over"]),
    ]
    launcher = Launcher(commands, key=lambda: next(keys))
    assert run(launcher, tmp_path / "go") == 0
    said = [line for line in capfd.readouterr().out.splitlines() if "machine" not in line]
    assert said == ["n3: got the key", "n3: got over"]


def test_a_machine_without_laminar_is_one_line(tmp_path, capfd) -> None:
    """And all others are told to leave."""
    joins = HostPart(Host("n3", 0), replicas=1, joins=True)
    launcher = launched((CONTROLLER, OBEYS), (joins, "exit 127"))
    assert run(launcher, tmp_path / "go") == 1
    out = capfd.readouterr()
    assert "got leave" in out.out
    said = "laminar: error: n3 has no laminar where this machine has it: VENV= names another, or install it"
    assert [line for line in out.err.splitlines() if line.startswith(said)]


# ---- the machine's side ------------------------------------------------------------------------------------


MACHINE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from laminar_hpc.launch import ranks
from laminar_hpc.launch.ssh import host
from helpers.stand_ins import one_rank
run_dir = Path(sys.argv[1])
ranks._RANK = ("bash", "-c")
script = "trap 'echo leaving; exit 0' TERM; while :; do echo here; sleep 0.1; done"
part = SimpleNamespace(role="rollout", start=lambda *_, **__: [one_rank("rollout", run_dir, script)])
host.parts_of = lambda *_: [part]
sys.exit(host.main(["experiment=demo", f"run_dir={run_dir}", *sys.argv[2:]]))
"""


def machine(run_dir: Path, *tied: str) -> subprocess.Popen[str]:
    """A machine's part, of which the replica is a stand-in that says so all the time; it has said so once."""
    (run_dir / "logs").mkdir()
    command = [sys.executable, "-c", MACHINE, str(run_dir), *tied]
    found = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout is not None and found.stdout.readline().startswith("machine ")
    assert found.stdout.readline() == "here\n"
    return found


@pytest.mark.parametrize("order", ["leave\n", "stop\n", ""])
def test_a_machine_obeys_and_with_tied_ends_with_its_connection(order: str, tmp_path: Path) -> None:
    """Orders come over the connection; its end is a stop for who asked for that. All that is said arrives."""
    process = machine(tmp_path, *["--tied"][: not order])
    said, _ = process.communicate(order, timeout=60)
    assert process.returncode == 0 and said.endswith("leaving\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_machine_that_is_taken_back_leaves_in_order(number: int, tmp_path: Path) -> None:
    """Promise (docs/promises.md#over-ssh): the signal of a shutdown does not end the agent, with whom its
    replicas would be killed before they could hand over what they generate."""
    process = machine(tmp_path)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and said.endswith("leaving\n")


def test_a_machine_goes_on_without_its_connection(tmp_path: Path) -> None:
    """The launcher has died, nobody reads: what runs there goes on, and its words are in the run's logs."""
    process = machine(tmp_path)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while not (logs := list((tmp_path / "logs").iterdir())):  # a line is passed on first, then kept
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (log,) = logs
    size = log.stat().st_size
    while log.stat().st_size < size + 20 * len("here\n"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
