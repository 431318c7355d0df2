"""The parent of one interpreter that runs verifiers. It ends all that the interpreter has started, whatever
sessions that has made: harnesses, tool servers, workers.

    python -m laminar_hpc.verifiers.keeper PARENT FD COMMAND...

On TERM, which also comes when the parent ends, the interpreter has END_SECONDS to end what is elsewhere, as
containers are; the other end of FD is closed by then. It runs no user code.
"""

import contextlib
import os
import signal
import subprocess
import sys
from typing import NoReturn

from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.environments.isolation import descendants, kernel

END_SECONDS = 3.0
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main() -> NoReturn:
    """Exits with 0; what the interpreter had to say it has said on FD."""
    parent, fd, *command = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)
    kernel.set_subreaper()
    with contextlib.suppress(OSError):
        child = subprocess.Popen([*command, str(fd)], pass_fds=(fd,), preexec_fn=_begin)
        os.close(fd)
        while signal.sigwait(_SIGNALS) == signal.SIGCHLD and not _ended(child.pid):
            pass
        signal.sigtimedwait({signal.SIGCHLD}, 0 if _ended(child.pid) else END_SECONDS)
    descendants.end_all()
    os._exit(0)


def _begin() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent()


def _ended(child: int) -> bool:
    """Reaps whoever has ended; whether the child is among them."""
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if pid == child:
                return True
        return False
    return True


if __name__ == "__main__":
    main()
