"""The preloaded process: `python -m laminar_hpc.environments.sandbox.zygote FD`, started by local.py.

It imports what code will want, goes to the asked tier, and forks keepers, as many as calls may run at a time.
Each takes connections from that socket, and has a process ready for the next call. It holds no secret: it is
started with a clean environment and no descriptor but the socket. It ends when the last process that could
send it calls is gone.
"""

import gc
import importlib
import os
import socket
import sys
import traceback

from laminar_hpc.environments.isolation import descendants, kernel
from laminar_hpc.environments.sandbox import keeper, places
from laminar_hpc.environments.sandbox.places import SandboxTier
from laminar_hpc.environments.sandbox.protocol import SandboxSetup, decode_setup

MAX_PACKET = 1 << 16


def serve(control: socket.socket, place: SandboxTier | None, trouble: str, at_once: int) -> None:
    """Until nobody can send calls; replaces keepers that die. `place` None: answers all with `trouble`."""
    parent = os.getpid()

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                keeper.keep(control, place, trouble, parent)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    kernel.set_subreaper()  # of what a keeper leaves that was killed
    keepers = {fork() for _ in range(at_once or len(os.sched_getaffinity(0)))}
    while keepers:
        pid, status = os.wait()
        if pid in keepers:
            keepers.discard(pid)
            if status:
                descendants.end_all(spared=frozenset(keepers))
                keepers.add(fork())


def _prepared(setup: SandboxSetup) -> tuple[SandboxTier | None, str]:
    try:
        for name in setup.preload:
            importlib.import_module(name)
        return places.prepare(setup), ""
    except ImportError as error:
        return None, f"the sandbox cannot import what it is to preload: {error}"
    except OSError as error:
        return None, f"no sandbox: {error.strerror or error}"


def main() -> None:
    """Does not return before its clients are gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    packet = control.recv(MAX_PACKET)
    if not packet:
        return
    setup = decode_setup(packet)
    place, trouble = _prepared(setup)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, the memory that it shares
    serve(control, place, trouble, setup.limits.at_once)


if __name__ == "__main__":
    main()
