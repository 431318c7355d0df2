"""How far this machine lets processes be kept apart, tried in processes that end at once.

namespaces   own PID, mount, network, IPC and user namespaces, with Landlock where the kernel has it
landlock     Landlock and seccomp: the same processes and file names, out of reach
rlimits      limits only; it protects from accidents, not from intent
"""

import os
from collections.abc import Callable
from functools import cache

from laminar_hpc.environments.isolation import kernel, landlock, seccomp

TIERS = ("namespaces", "landlock", "rlimits")
ISOLATION = ("auto", *TIERS)


@cache
def best() -> str:
    """The strongest tier of this machine; "" where it has neither namespaces nor Landlock."""
    return next((tier for tier in ("namespaces", "landlock") if not trouble(tier)), "")


@cache
def trouble(tier: str) -> str:
    """Why this machine does not have the tier; "" if it does."""
    if tier == "rlimits":
        return ""
    if not seccomp.supported():
        return f"seccomp on {os.uname().machine} is not known here"
    if tier == "landlock":
        return _attempt(_landlock)
    return _attempt(_namespaces)


def enter_namespaces(flags: int) -> None:
    """New namespaces of these kinds; of users too where this one may not make the others. Raises OSError."""
    try:
        kernel.unshare(flags)
    except PermissionError:
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        kernel.map_own_user()
    if flags & kernel.CLONE_NEWNS:
        kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


def _landlock() -> None:
    if not landlock.version():
        raise OSError("Landlock: the kernel has none, or it is switched off")
    kernel.drop_privileges()
    landlock.restrict(["/usr"], [])
    kernel.install_filter(seccomp.program(True, True, True, os.getpid()))


def _namespaces() -> None:
    """As the sandbox does it: its own, then user and PID namespaces, with /proc and read-only files."""
    enter_namespaces(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    kernel.mount("tmpfs", "/tmp", "tmpfs")
    os.mkdir("/tmp/usr")
    kernel.mount("/usr", "/tmp/usr", flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only("/tmp/usr")
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    pid = os.fork()
    if pid == 0:
        os._exit(_code(_in_pid_namespace))
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError(code, f"in a PID namespace: {os.strerror(code)}")


def _in_pid_namespace() -> None:
    kernel.mount("proc", "/proc", "proc")
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.drop_privileges()
    kernel.install_filter(seccomp.program(False, False, True))


def _code(body: Callable[[], None]) -> int:
    try:
        body()
    except OSError as error:
        return error.errno or 1
    return 0


def _attempt(body: Callable[[], None]) -> str:
    """What `body` raises in a process of its own, as a text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except OSError as error:
            os.write(writing, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said or (f"trying it ended with {code}" if code else "")
