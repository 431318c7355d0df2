"""Ends all that a process has started, wherever it went: sessions of its own, double forks, fork bombs.

The caller is a subreaper (kernel.set_subreaper) or the first process of a PID namespace, so that descendants
whose parent has died are its children. Nobody leaves that: a child is found by its parent, not by its group.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

END_SECONDS = 10.0  # what the kernel does not end within it is left to it
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # asks and leaves it a zombie


def children(parent: int) -> list[int]:
    """The processes whose parent this is, by /proc."""
    found = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    stat = Path(entry.path, "stat").read_bytes().rpartition(b") ")[2].split()
                    if int(stat[1]) == parent:
                        found.append(int(entry.name))
    return found


def has_children() -> bool:
    """Whether this process has any, dead ones included; much cheaper than to look for them."""
    try:
        os.waitid(os.P_ALL, 0, _ENDED)
    except ChildProcessError:
        return False
    return True


def end_all(spared: frozenset[int] = frozenset()) -> bool:
    """Kills all children of this process and all that become its children by that, but for `spared`, and
    reaps them. Returns whether none is left after END_SECONDS."""
    deadline = time.monotonic() + END_SECONDS
    while has_children() and (found := [pid for pid in children(os.getpid()) if pid not in spared]):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            if not _reaped(pid, deadline):
                return False
    return True


def end_session(leader: int, grace: float = 0.0) -> int:
    """Kills a child that leads a session, after `grace` seconds in which it may end by itself, and then all
    that has come of it (`end_all`). Returns the child's exit code."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and not os.waitid(os.P_PID, leader, _ENDED):
        time.sleep(0.02)
    for kill in (os.killpg, os.kill):  # it may have no group yet
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    end_all()
    return code


def _reaped(pid: int, deadline: float) -> bool:
    """Waits for a child that was killed; until the deadline, as it may be stuck in the kernel."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
    return True
