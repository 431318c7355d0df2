"""The preloaded process: `python -m laminar_hpc.environments.sandbox.zygote FD`, started by local.py.

It imports what code will want, goes to the asked tier, and then forks keepers. Some wait, so that a call
finds its process ready; one takes each connection that comes over the socket, so many at a time. It holds no
secret: it is started with a clean environment and no descriptor but that socket. It ends when the last
process that could send it calls is gone.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque

from laminar_hpc.environments.isolation import descendants, kernel
from laminar_hpc.environments.sandbox import keeper, places
from laminar_hpc.environments.sandbox.places import Place
from laminar_hpc.environments.sandbox.protocol import Setup, decode_setup

MAX_PACKET = 1 << 16
_SOCKETS_AT_ONCE = 16  # in one packet


class Zygote:
    """Forks keepers. `place` None: `trouble` is the answer to every call."""

    def __init__(self, control: socket.socket, place: Place | None, trouble: str, at_once: int) -> None:
        self._control, self._place, self._trouble = control, place, trouble
        self._at_once = at_once or len(os.sched_getaffinity(0))
        self._calls: deque[socket.socket] = deque()  # connections that wait for a place
        self._waiting: deque[tuple[int, socket.socket]] = (
            deque()
        )  # keepers without a call, and how to reach them
        self._busy: set[int] = set()

    def serve(self) -> None:
        """Until nobody can send calls any more."""
        kernel.set_subreaper()  # of what a keeper leaves that was killed
        waking, wake = os.pipe()
        for end in (waking, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            while self._calls and len(self._busy) < self._at_once:
                self._pass_on(self._calls.popleft())
            while len(self._waiting) < self._at_once:
                self._waiting.append(self._fork())
            ready, _, _ = select.select([self._control.fileno(), waking], [], [])
            if waking in ready:
                os.read(waking, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._take():
                return

    def _take(self) -> bool:
        """The next connections; False when there are none to come."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET, _SOCKETS_AT_ONCE)
        self._calls += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return bool(packet)

    def _pass_on(self, connection: socket.socket) -> None:
        pid, orders = self._waiting.popleft() if self._waiting else self._fork()
        with connection, orders, contextlib.suppress(ConnectionError):  # it has just died: that is seen there
            socket.send_fds(orders, [b"."], [connection.fileno()])
        self._busy.add(pid)

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (self._control, ours, *self._calls, *(orders for _, orders in self._waiting)):
                    other.close()
                keeper.keep(theirs, self._place, self._trouble)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        return pid, ours

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                keepers = self._busy | {pid for pid, _ in self._waiting}
                self._busy.discard(ended[0])
                self._waiting = deque(each for each in self._waiting if each[0] != ended[0])
                if ended[0] in keepers and os.WIFSIGNALED(ended[1]):
                    descendants.end_all(spared=frozenset(keepers - {ended[0]}))


def _prepared(setup: Setup) -> tuple[Place | None, str]:
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
    Zygote(control, place, trouble, setup.limits.at_once).serve()


if __name__ == "__main__":
    main()
