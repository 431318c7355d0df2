"""Processes and machines: naming them for good, telling whether they live, and dying with one's parent."""

import ctypes
import os
import pwd
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def process_started(pid: int) -> str:
    """Start time of a process in clock ticks since boot: with the pid it names one process for good.

    Empty if it does not run (a zombie does not).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # asked ten times a second
            fields = file.read().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in b"ZX" else fields[19].decode()


def process_is_alive(pid: int) -> bool:
    """Whether a process with this id exists and is no zombie."""
    return process_started(pid) != ""


def process_world() -> str:
    """What makes process ids mean something: this boot of this machine, and this container."""
    return f"{boot()} {os.readlink('/proc/self/ns/pid')}"


def boot() -> str:
    """Names this machine since it was started; no other one has the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_name(shm_dir: str) -> str:
    """Names what shares memory with this process: the host, which shared-memory folders it sees, and its
    boot, as machines of several places may all be called the same."""
    device = os.stat(shm_dir).st_dev if os.path.isdir(shm_dir) else 0
    return f"{socket.gethostname()}/{device}/{boot()[:8]}"


def parent_process() -> str:
    """Names this process's parent for good: of a rank, its agent or torchrun."""
    return f"{socket.gethostname()} {process_world()} {os.getppid()} {process_started(os.getppid())}"


def user_name() -> str:
    """Who runs this process; the number where it has no name, as in many containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """The kernel sends the calling process this signal when its parent ends: nothing is left behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def on_stop_signals(handler: Callable[[int, object], None]) -> None:
    """`handler` hears INT, TERM, USR1 and, but for a process under nohup, HUP, the end of the terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def oom_kills(events: Path = Path("/sys/fs/cgroup/memory.events")) -> int:
    """How many processes of this container the kernel has killed for want of memory; 0 where unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
