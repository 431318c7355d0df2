"""One machine's part of a run without Slurm, as `laminar launch` starts it over ssh:

    python -m laminar_hpc.jobs.host --controller --trainers=0/2 --replicas=2 run_dir=... [overrides]

Starts the machine's processes of these roles, each as launch/ROLE.sh would, and waits until all have ended.
What they say goes to the standard output while somebody reads it, and to RUN_DIR/logs/host-NAME.log. Lines on
the standard input are orders: `stop`, the run is to end in order; `leave`, these processes are to leave. With
--tied the end of the input, which is that of the launcher or its connection, is a `stop`; else the machine
goes on without them. Exit code: 0 = done or left in order, 2 = refused, 1 = failed.
"""

import argparse
import getpass
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from laminar_hpc import __version__
from laminar_hpc.cluster.launch import REFUSED
from laminar_hpc.cluster.run_end import goes_on
from laminar_hpc.cluster.stop import request_stop
from laminar_hpc.cluster.terminal import SHARED_VARIABLE
from laminar_hpc.config.errors import LaminarError, Refused, print_lines
from laminar_hpc.config.load import load_config
from laminar_hpc.jobs.machine_number import MachineNumber
from laminar_hpc.jobs.network import INTERFACE, addresses, own_address, use_interface
from laminar_hpc.jobs.node import Child, Place, commands
from laminar_hpc.observability import console, output

_LOOK_SECONDS = 0.5
_ALONE_SECONDS = 20.0  # of relays after their replicas: at the end of a run they leave by themselves
_CLOSE_SECONDS = 5.0
_SEEN_SECONDS = 15.0  # for a network file system to show what the launcher has written
_CTRL_C = "SIGINT"  # of the launcher, as the run records it


class Output:
    """Takes the standard output and error of this process and all that it starts, and passes them on: a
    reader that has gone ends nobody."""

    def __init__(self, run_dir: Path) -> None:
        self._log = run_dir / "logs" / f"host-{socket.gethostname()}.log"
        self._reader = output.Stream(os.dup(1))
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
    """What the launcher says, as it comes: the words of `stop` and `leave`."""

    def __init__(self, tied: bool) -> None:
        self.given: list[str] = []
        self._tied = tied
        self._lines = os.fdopen(os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # what is started here reads none of them
        os.close(nothing)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            for line in self._lines:
                self.given.append(line.strip())
        if self._tied:
            self.given.append("stop")


class HostRun:
    """The processes of this machine."""

    def __init__(self, run_dir: Path, started: dict[str, list[str]], orders: Orders) -> None:
        self._run_dir, self._orders, self._done, self._left = run_dir, orders, 0, False
        self._children = [Child(role, command) for role, command in started.items()]

    def run(self) -> int:
        """Until all have ended; the first exit code that is not 0, the replicas' before the relays'."""
        codes: dict[str, int] = {}
        ends: dict[str, float] = {}
        again = partial(goes_on, self._run_dir)
        while len(codes) < len(self._children):
            self._obey()
            for child in self._children:
                if child.role not in codes and (code := child.code(self._left, again)) is not None:
                    codes[child.role], ends[child.role] = code, time.monotonic()
            for one, other in (("relay", "rollout"), ("rollout", "relay")):
                if one in ends and other not in ends and time.monotonic() > ends[one] + _ALONE_SECONDS:
                    self._leave()
            time.sleep(_LOOK_SECONDS)
        return codes.get("rollout") or next((code for code in codes.values() if code), 0)

    def _obey(self) -> None:
        for order in self._orders.given[self._done :]:
            self._done += 1
            if order == "leave" or (order == "stop" and not self._stop()):
                self._leave()

    def _stop(self) -> bool:
        """Whether somebody has the request; machines of replicas alone leave."""
        if {child.role for child in self._children} <= {"relay", "rollout"}:
            return False
        with suppress(LaminarError):
            request_stop(self._run_dir, _CTRL_C)
            return True
        return False

    def _leave(self) -> None:
        self._left = True
        for child in self._children:
            child.leave(_CTRL_C)


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
                [f"{mark} is not seen here: run_dir must be on a file system that all machines share"]
            )
        time.sleep(0.1)
    if version != __version__:
        raise Refused([f"laminar {__version__} is installed here and {version} where it was launched"])


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("python -m laminar_hpc.jobs.host", allow_abbrev=False)
    parser.add_argument("--controller", action="store_true")
    parser.add_argument("--trainers", default="")
    parser.add_argument("--replicas", default="")
    parser.add_argument("--launch", default="")
    parser.add_argument("--tied", action="store_true")
    return parser.parse_known_args(arguments)


def started_by(
    options: argparse.Namespace, words: list[str], run_dir: Path, machine: int
) -> dict[str, list[str]]:
    """What this machine starts, by role."""
    config, address = load_config(words), own_address_for_others()
    use_interface(address)
    os.environ.setdefault("STORE_DIR", str(Path(tempfile.gettempdir()) / f"laminar-{getpass.getuser()}"))
    os.environ["ROLLOUTS"] = options.replicas
    node, _, nodes = options.trainers.partition("/")
    wanted = {"controller": options.controller, "trainer": options.trainers, "rollouts": options.replicas}
    found: dict[str, list[str]] = {}
    for role in (role for role, here in wanted.items() if here):
        place = Place(role, int(node or 0), int(nodes or 1), run_dir, options.launch, None)
        found |= commands(place, config, words, address, machine)
    return found


def main(arguments: list[str]) -> int:
    """See above."""
    output.guard()
    options, words = parsed(arguments)
    passed_on = machine = None
    try:
        config = load_config(words)
        run_dir = Path(config.run_dir)
        check_here(run_dir, options.launch)
        os.environ[SHARED_VARIABLE] = "1"
        passed_on = Output(run_dir)
        machine = MachineNumber(run_dir, config.relay.lanes) if options.replicas else None
        started = started_by(options, words, run_dir, machine.number if machine else 0)
        print(console.line("machine", f"{socket.gethostname()}  {', '.join(started)}"), flush=True)
        return HostRun(run_dir, started, Orders(options.tied)).run()
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
