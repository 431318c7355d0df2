"""The parent of one worker. It outlives the worker, and ends all that the worker has started, whatever
sessions that has made.

    fork server -> keeper, a subreaper -> worker, which leads a session -> what the user's code starts

The fork server tells it by TERM when the worker is to be gone; the kernel does when the fork server is. Until
then a dead worker stays a zombie, so that its pid is nobody else's. It runs no user code.
"""

import os
import signal
from collections.abc import Callable
from typing import NoReturn

from laminar_hpc.environments.isolation import descendants, kernel
from laminar_hpc.machine.processes import die_with_parent

_ORDERS = {signal.SIGTERM}


def keep(parent: int, told: int, work: Callable[[], None], grace: float) -> NoReturn:
    """Forks the worker, which does `work`, writes its pid to the descriptor `told`, and waits for the order
    to end it; the worker then has `grace` seconds to end by itself. `parent` is the fork server's pid."""
    os.setsid()  # out of the fork server's group, which is killed as a whole
    signal.pthread_sigmask(signal.SIG_BLOCK, _ORDERS)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)
    kernel.set_subreaper()
    keeper, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(told)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ORDERS)
        die_with_parent()
        if os.getppid() == keeper:
            os.setsid()
            work()
        os._exit(0)
    os.write(told, str(pid).encode())
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    signal.sigwait(_ORDERS)
    descendants.end_session(pid, grace)
    os._exit(0)
