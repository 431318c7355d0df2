"""A real controller that dies by SIGKILL at a chosen moment of a turn, again and again over one run folder.

    python tests/helpers/control/mortal.py RUN_DIR

reads moments from its input, one a line, and begins a life for each; says how long its start took, and how it
ended.

A moment is `before SUBJECT` or `after SUBJECT` the commit of the first turn in which a message of the type
SUBJECT was heard or is to be sent; "" is a life that the test ends. With `stuck SUBJECT` the loop blocks
before that commit, and the controller notices sooner than it would.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from laminar_hpc.config.load import read_config
from laminar_hpc.controller import run as controller_run
from laminar_hpc.controller.loop import Controller
from laminar_hpc.controller.shared import Outbox
from laminar_hpc.line.hub import Hub
from laminar_hpc.machine.loop_watch import LoopWatch
from laminar_hpc.machine.processes import die_with_parent, machine_name
from laminar_hpc.report.ending import finish
from laminar_hpc.store.store import Store

HUNG_SECONDS = 1.0


def live(run_dir: Path, moment: str) -> None:
    """The whole life, in a process of its own."""
    die_with_parent()
    when, _, subject = moment.partition(" ")
    seen: set[str] = set()
    watches: list[LoopWatch] = []

    def watch(owner: type, name: str, place: int) -> None:
        """Notes the type of the message that is argument `place` of a method."""
        before = getattr(owner, name)

        def noted(*arguments: object) -> object:
            seen.add(type(arguments[place]).__name__)
            return before(*arguments)

        setattr(owner, name, noted)

    def die_at(owner: type, name: str) -> None:
        before = getattr(owner, name)

        def dies(*arguments: object) -> object:
            if subject in seen and when == "stuck":
                for each in watches:
                    each._least = each._most = HUNG_SECONDS
                print("stuck", flush=True)
                threading.Event().wait()
            if subject in seen:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(*arguments)

        setattr(owner, name, dies)

    if moment:
        watch(Controller, "handle", 2)
        watch(Outbox, "send", 2)
        watch(Outbox, "send_to", 2)
        die_at(*((Hub, "committed") if when == "after" else (Store, "commit")))
        watch_made = LoopWatch.__init__

        def noted_watch(self: LoopWatch, *arguments: object, **more: object) -> None:
            watches.append(self)
            watch_made(self, *arguments, **more)

        LoopWatch.__init__ = noted_watch
    config = read_config(run_dir / "config.yaml")
    machine = machine_name(config.relay.shm_dir)
    controller_run.run(config, 1, machine, lambda text: print(text, flush=True), lambda: None, finish)


def main(run_dir: Path) -> None:
    die_with_parent()
    for line in sys.stdin:
        begun, pid = time.monotonic(), os.fork()
        if pid == 0:
            code = 1
            try:
                live(run_dir, line.strip())
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(f"begun {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)} after {time.monotonic() - begun:.2f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
