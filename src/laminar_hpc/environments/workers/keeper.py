"""The parent of one reward worker: it outlives the worker, and ends all that the worker has started, whatever
sessions that has made.

    fork server -> keeper, a subreaper -> worker, which leads a session -> what the functions start

The fork server tells it by TERM when the worker is to be gone; the kernel does when the fork server is. Until
then a dead worker stays a zombie, so that its pid is nobody else's. It runs no user code.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from typing import NoReturn

from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.environments.isolation import descendants, kernel, limits

_LARGEST_FILE = 4 << 30  # bytes that a function may write into one
_OTHERS_TASKS = 4096  # processes and threads that may come to those of this user
_ORDERS = {signal.SIGTERM}


def keep(parent: int, told: int, work: Callable[[], None]) -> NoReturn:
    """Forks the worker, which does `work`, writes its pid to the descriptor `told`, and waits for the order
    to end it. `parent` is the fork server's pid."""
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
            _limit()
            work()
        os._exit(0)
    os.write(told, str(pid).encode())
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    signal.sigwait(_ORDERS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it had no group yet
    os.waitpid(pid, 0)
    descendants.end_all()
    os._exit(0)


def _limit() -> None:
    """Of the worker and all that it starts. Memory has no limit, as models are loaded too; when it runs out,
    the kernel ends these processes first."""
    limits.prefer_for_killing()
    limits.lower(resource.RLIMIT_CORE, 0)
    limits.lower(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    if os.geteuid() != 0:  # the kernel does not count root's
        limits.lower(resource.RLIMIT_NPROC, limits.tasks_of_user() + _OTHERS_TASKS)
