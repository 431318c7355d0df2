"""The preloaded process: `python -m laminar_hpc.environments.sandbox.zygote FD`, started by local.py.

It imports what code will want, goes to the asked tier, and forks keepers, among which it divides the
connections that come over its socket. Each keeper has a process ready for the next call. It holds no secret:
it is started with a clean environment and no descriptor but that socket. It ends when the last process that
could send it calls is gone.
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
    """Forks keepers, one more than calls may run at a time, as each gets ready again after a call, and
    divides calls among them. `place` None: `trouble` is the answer to every call."""

    def __init__(self, control: socket.socket, place: Place | None, trouble: str, at_once: int) -> None:
        self._control, self._place, self._trouble = control, place, trouble
        self._at_once = at_once or len(os.sched_getaffinity(0))
        self._calls: deque[socket.socket] = deque()  # connections that wait for a keeper
        self._keepers: dict[int, socket.socket] = {}  # pid -> how to reach it
        self._ready: deque[int] = deque()  # those that wait for a call
        self._running: set[int] = set()  # those that have one

    def serve(self) -> None:
        """Until nobody can send calls any more."""
        kernel.set_subreaper()  # of what a keeper leaves that was killed
        waking, wake = os.pipe()
        for end in (waking, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            while len(self._keepers) <= self._at_once:
                self._fork()
            while self._calls and self._ready and len(self._running) < self._at_once:
                self._pass_on(self._calls.popleft(), self._ready.popleft())
            speakers = {orders.fileno(): pid for pid, orders in self._keepers.items()}
            poller = select.poll()  # not select(): a thousand calls may wait, and so numbers be above 1,023
            for number in (self._control.fileno(), waking, *speakers):
                poller.register(number, select.POLLIN)
            ready = {number for number, _ in poller.poll()}
            for keeper_that_speaks in (speakers[number] for number in ready & speakers.keys()):
                self._listen(keeper_that_speaks)
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

    def _pass_on(self, connection: socket.socket, pid: int) -> None:
        self._running.add(pid)
        with connection, contextlib.suppress(ConnectionError):  # it has just died: the client asks again
            socket.send_fds(self._keepers[pid], [b"."], [connection.fileno()])

    def _listen(self, pid: int) -> None:
        words = b""
        with contextlib.suppress(ConnectionError):  # it has died: its end is seen too
            words = self._keepers[pid].recv(16)
        for word in words:
            if word == keeper.DONE[0]:
                self._running.discard(pid)
            else:
                self._ready.append(pid)

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (self._control, ours, *self._calls, *self._keepers.values()):
                    other.close()
                keeper.keep(theirs, self._place, self._trouble)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        self._keepers[pid] = ours

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (orders := self._keepers.pop(ended[0], None)) is not None:
                    orders.close()
                    self._running.discard(ended[0])
                    self._ready = deque(pid for pid in self._ready if pid != ended[0])
                    descendants.end_all(spared=frozenset(self._keepers))


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
