"""One machine's part of a run without Slurm, as `laminar launch` starts it over ssh:

    python -m laminar_hpc.launch.ssh.host --controller --trainers=0/2 --replicas=2 run_dir=... [overrides]

Starts the machine's processes of these roles, each as launch/ROLE.sh would, and waits until all have ended.
What they say goes to the standard output while somebody reads it, and to RUN_DIR/logs/host-NAME.log. Lines on
the standard input are orders: `stop`, the run is to end in order; `leave`, these processes are to leave. With
--tied the end of the input, which is that of the launcher or its connection, is a `stop`; else the machine
goes on without them. TERM and HUP to this process are a `stop` where the run cannot do without the machine,
else a `leave`. Exit code: 0 = done or left in order, 2 = refused, 1 = failed.
"""

import argparse
import getpass
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError, Refused, print_lines
from laminar_hpc.config.load import load_config
from laminar_hpc.launch.launch import NodeAgent
from laminar_hpc.launch.launch_role import RolePart
from laminar_hpc.launch.slurm.machine_number import MachineNumber
from laminar_hpc.launch.slurm.network import INTERFACE, addresses, own_address, use_interface
from laminar_hpc.launch.slurm.node import NodePlace, parts
from laminar_hpc.line.agent_line import REFUSED, RankOrders
from laminar_hpc.machine.observability import console, output
from laminar_hpc.machine.processes import on_stop_signals

_CLOSE_SECONDS = 5.0
_SEEN_SECONDS = 15.0  # for a network file system to show what the launcher has written
_CTRL_C = "SIGINT"  # of the launcher, as the run records it


class HostOutput:
    """Takes the standard output and error of this process and all that it starts, and passes them on: a
    reader that has gone ends nobody."""

    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / "logs" / f"host-{socket.gethostname()}.log"
        self._reader = output.ConsoleStream(os.dup(1))
        read_end, write_end = os.pipe()
        for number in (1, 2):
            os.dup2(write_end, number)
        os.close(write_end)
        self._lines = os.fdopen(read_end, "rb")
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        for line in self._lines:
            self._reader.write(line.decode(errors="backslashreplace"))
            with suppress(OSError):  # before the run has its folder, or on a full disk
                if self._log.parent.is_dir():
                    with open(self._log, "ab") as file:
                        file.write(line)

    def close(self) -> None:
        """All that was said is passed on, unless a process that was left behind could still speak."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(nowhere, number)
        self._thread.join(_CLOSE_SECONDS)


class Orders:
    """What the launcher says, as it comes, the words of `stop` and `leave`; and signals, as of a machine that
    is taken back."""

    def __init__(self, tied: bool) -> None:
        self._given: deque[str | int] = deque()
        self._tied = tied
        self._lines = os.fdopen(os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # what is started here reads none of them
        os.close(nothing)
        on_stop_signals(lambda number, _: self._take(number))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            for line in self._lines:
                self._take(line.strip())
        if self._tied:
            self._take("stop")

    def _take(self, order: str | int) -> None:
        self._given.append(order)

    def obey(self, agent: NodeAgent) -> None:
        """Does what has been said since the last time."""
        while self._given:
            if (order := self._given.popleft()) == "stop":
                agent.stop(_CTRL_C)
            elif order == "leave":
                agent.leave()
            elif isinstance(order, int):
                agent.on_signal(order)


def own_address_for_others() -> str:
    """At which the launcher has reached this machine, unless LAMINAR_INTERFACE names another way; never
    loopback where there is a network."""
    here = addresses()
    reached = os.environ.get("SSH_CONNECTION", "").split()
    if not os.environ.get(INTERFACE):
        if len(reached) == 4 and reached[2] in here.values():
            return reached[2]
        if not here:
            return "127.0.0.1"
    return own_address()


def check_here(run_dir: Path, launch: str) -> None:
    """Raises Refused on a machine that does not see the launcher's folder, or has another version; a line
    that was typed by hand has no `launch`."""
    mark, version = run_dir / "jobs" / f"launch.{launch}", "" if launch else __version__
    deadline = time.monotonic() + _SEEN_SECONDS
    while not version:
        with suppress(OSError):
            os.listdir(mark.parent)  # asks the server
            version = mark.read_text().strip()
            continue
        if time.monotonic() > deadline:
            raise Refused(
                [
                    f"{mark} is not seen here: run_dir must be on a file system that all machines share, "
                    "with cluster.storage=stream those of controller and trainers"
                ]
            )
        time.sleep(0.1)
    if version != __version__:
        raise Refused([f"laminar {__version__} is installed here and {version} where it was launched"])


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("python -m laminar_hpc.launch.ssh.host", allow_abbrev=False)
    parser.add_argument("--controller", action="store_true")
    parser.add_argument("--trainers", default="")
    parser.add_argument("--replicas", default="")
    parser.add_argument("--relay", action="store_true")
    parser.add_argument("--launch", default="")
    parser.add_argument("--tied", action="store_true")
    return parser.parse_known_args(arguments)


def parts_of(options: argparse.Namespace, words: list[str], run_dir: Path, machine: int) -> list[RolePart]:
    config, address = load_config(words), own_address_for_others()
    use_interface(address)
    os.environ.setdefault("STORE_DIR", str(Path(tempfile.gettempdir()) / f"laminar-{getpass.getuser()}"))
    os.environ["ROLLOUTS"] = options.replicas
    node, _, nodes = options.trainers.partition("/")
    wanted = {"controller": options.controller, "trainer": options.trainers, "rollouts": options.replicas}
    places = [
        NodePlace(role, int(node or 0), int(nodes or 1), run_dir, options.launch, None)
        for role, here in wanted.items()
        if here
    ]
    found = [part for place in places for part in parts(place, config, words, address, machine)]
    if options.relay:  # alone, for machines that see no folder of the run
        own = NodePlace("rollouts", 0, 1, run_dir, options.launch, None)
        found += [part for part in parts(own, config, words, address, machine) if part.role == "relay"]
    return found


def main(arguments: list[str]) -> int:
    output.guard()
    options, words = parsed(arguments)
    passed_on = machine = None
    try:
        config = load_config(words)
        run_dir = Path(config.run_dir)
        check_here(run_dir, options.launch)
        passed_on = HostOutput(run_dir)
        machine = MachineNumber(run_dir, config.relay.lanes) if options.replicas or options.relay else None
        found = parts_of(options, words, run_dir, machine.number if machine else 0)
        roles = ", ".join(part.role for part in found)
        print(console.line("machine", f"{socket.gethostname()}  {roles}"), flush=True)
        orders = Orders(options.tied)  # before anything starts that would read them
        groups = [each for part in found for each in part.start(RankOrders(one_terminal=True), tended=True)]
        agent = NodeAgent(run_dir, groups, one_terminal=True)
        return agent.run(partial(orders.obey, agent))
    except LaminarError as error:
        print_lines(error)
        return REFUSED
    finally:
        if machine:
            machine.release()
        if passed_on:
            passed_on.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
