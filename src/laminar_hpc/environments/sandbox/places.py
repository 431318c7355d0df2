"""Where a call's code runs, by tier: `prepare` makes the preloaded process ready, once; then each call's
keeper uses a SandboxTier.

    namespaces   among no other processes, on a file system that holds nothing else
    others       among all processes and files; the keeper is a subreaper and ends all descendants
"""

import contextlib
import os
import resource
import select
import shutil
import signal
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.environments.isolation import descendants, kernel, landlock, limits, seccomp, tiers
from laminar_hpc.environments.sandbox.protocol import Limits, SandboxSetup
from laminar_hpc.machine.processes import die_with_parent

BOX = "/box"
_NOBODY = 65534
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_OTHERS_TASKS = 256  # that others of this user may start while a call runs
_ROOT_BYTES = "size=1m,mode=755"
Body = Callable[[], None]
Streams = tuple[int, int, int]


def readable() -> list[str]:
    """What code may read: Python with its packages, and the system's programs and libraries."""
    python = {sys.prefix, sys.base_prefix, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib"))}
    return [*_SYSTEM, *sorted(os.path.realpath(path) if path == sys.base_prefix else path for path in python)]


def prepare(setup: SandboxSetup) -> "SandboxTier":
    """Brings this process to the asked tier. Raises OSError with why the machine does not have it."""
    tier = setup.isolation if setup.isolation != "auto" else tiers.best()
    if not tier:
        raise OSError(
            "this machine has neither user namespaces nor Landlock for it "
            f"({tiers.trouble('namespaces')}; {tiers.trouble('landlock')}); where nobody writes code but "
            "those you trust, isolation='rlimits' runs it with limits only"
        )
    if reason := tiers.trouble(tier):
        raise OSError(f"this machine does not have isolation={tier!r}: {reason}")
    if tier == "namespaces":
        _build_root(setup.folder)
        _become_first_process()
        return Namespaces(setup.limits)
    folder = _become_nobody_in(setup.folder)
    return SharedFiles(setup.limits, folder, locked=tier == "landlock")


class SandboxTier(ABC):
    """Of one keeper, call after call: `start` forks ahead, `begin` comes with the call, `end` after it."""

    def __init__(self, given: Limits) -> None:
        self.limits = given
        self.pid = 0

    @abstractmethod
    def start(self, body: Body, streams: Streams) -> int:
        """`body` in a box with these streams. Returns a descriptor that can be read when it has ended."""

    def begin(self) -> None:  # noqa: B027
        """The code is about to begin; `start` may be long ago."""

    @abstractmethod
    def end(self) -> int:
        """The exit code of `body`'s process; nothing that it has started is left."""


class Namespaces(SandboxTier):
    """Each call is the first process of a PID namespace, with a box and a /proc of its own; the kernel ends
    all others of a namespace with the first. The mounts are those of the keeper, which takes them away before
    the next call: that takes the kernel longer than a call."""

    def __init__(self, given: Limits) -> None:
        super().__init__(given)
        self._own_namespace = -1  # descriptor, of the keeper

    def start(self, body: Body, streams: Streams) -> int:
        if self._own_namespace < 0:
            kernel.unshare(kernel.CLONE_NEWNS)
            self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        while os.path.ismount(BOX):
            kernel.unmount(BOX)
            kernel.unmount("/proc")
        kernel.children_in(self._own_namespace)
        kernel.unshare(kernel.CLONE_NEWPID)
        keeper = os.pidfd_open(os.getpid())
        self.pid = os.fork()
        if self.pid == 0:
            _guarded(lambda: self._code(body, streams, keeper))
        os.close(keeper)
        return os.pidfd_open(self.pid)

    def _code(self, body: Body, streams: Streams, keeper: int) -> None:
        die_with_parent()
        if select.select([keeper], [], [], 0)[0]:
            return  # it had died before
        nothing_else = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("proc", "/proc", "proc", nothing_else)
        room = f"size={self.limits.box_bytes},nr_inodes=16384,mode=700"
        kernel.mount("tmpfs", BOX, "tmpfs", nothing_else, room)
        _enter(BOX, streams)
        kernel.unshare(kernel.CLONE_NEWUSER)  # so that the number of processes counts those of this call
        limits.set_limits(self.limits.memory_bytes, self.limits.file_bytes, self.limits.processes)
        kernel.drop_privileges()
        if landlock.version():
            landlock.restrict(["/"], [BOX, "/dev"])
        kernel.install_filter(seccomp.program(shared_files=False, shared_signals=False, processes=True))
        body()

    def end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class SharedFiles(SandboxTier):
    """Each call among the machine's processes and files; `locked`: with Landlock and seccomp."""

    def __init__(self, given: Limits, folder: str, locked: bool) -> None:
        super().__init__(given)
        self._folder = folder
        self._locked = locked
        self._box = ""
        self._paths = readable()
        self._counts = os.geteuid() != 0  # the kernel does not count root's processes

    def start(self, body: Body, streams: Streams) -> int:
        kernel.set_subreaper()
        self._box = tempfile.mkdtemp(dir=self._folder)
        self.pid = os.fork()
        if self.pid == 0:
            _guarded(lambda: self._code(body, streams))
        return os.pidfd_open(self.pid)

    def _code(self, body: Body, streams: Streams) -> None:
        _enter(self._box, streams)
        limits.set_limits(self.limits.memory_bytes, self.limits.file_bytes, None)
        kernel.drop_privileges()
        if self._locked:
            devices = [f"/dev/{name}" for name in _DEVICES]
            landlock.restrict(self._paths, [self._box, *devices])
            alone = landlock.version() >= landlock.SCOPED_SIGNALS
            kernel.install_filter(seccomp.program(True, not alone, self._counts, os.getpid()))
        body()

    def begin(self) -> None:
        """All tasks of this user count, whoever started them, so the limit is above those that there are."""
        if self._counts:
            most = limits.tasks_of_user() + _OTHERS_TASKS + self.limits.processes
            resource.prlimit(self.pid, resource.RLIMIT_NPROC, (most, most))

    def end(self) -> int:
        code = descendants.end_session(self.pid)
        shutil.rmtree(self._box, ignore_errors=True)
        return code


def _guarded(body: Body) -> None:
    """A forked process never returns into the code that forked it."""
    status = 70
    try:
        body()
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(status)


def _enter(box: str, streams: Streams) -> None:
    """A session of its own in the box, with no descriptor but these."""
    os.setsid()
    os.umask(0o077)
    limits.prefer_for_killing()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(box)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ |= {"HOME": box, "TMPDIR": box, "PWD": box}
    tempfile.tempdir = None
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _build_root(folder: str) -> None:
    """A root that holds `readable`, read-only, and nothing else; then namespaces for this user alone, in
    which it may make those of the calls."""
    root = Path(folder, "root")
    root.mkdir()
    privileged = os.geteuid() == 0
    others = kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    tiers.enter_namespaces(kernel.CLONE_NEWNS | (0 if privileged else others))
    kernel.mount("tmpfs", str(root), "tmpfs", kernel.MS_NOSUID, _ROOT_BYTES)
    for path in readable():
        _show(root, path)
    for name in _DEVICES:
        _bind(f"/dev/{name}", root)
    for name in ("proc", BOX[1:]):
        (root / name).mkdir()
    for name in ("tmp", "dev/shm"):
        if not (root / name).exists():  # Python may lie there
            (root / name).symlink_to(BOX)
    kernel.mount("/proc", str(root / "proc"), flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.pivot_root(str(root))
    kernel.make_read_only("/", below=False)
    if privileged:
        _become_nobody()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | others)
        kernel.map_own_user()


def _become_first_process() -> None:
    """Goes on as the first process of a PID namespace, which a keeper may make others in; the one that was
    started waits for its end, and they die together."""
    kernel.unshare(kernel.CLONE_NEWPID)
    waiting = os.pidfd_open(os.getpid())
    if pid := os.fork():
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.waitpid(pid, 0)
        os._exit(0)
    die_with_parent()
    if select.select([waiting], [], [], 0)[0]:
        os._exit(0)
    os.close(waiting)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)


def _show(root: Path, path: str) -> None:
    """Binds a file or a folder of the machine; a link is made again."""
    if not os.path.lexists(path) or os.path.lexists(f"{root}{path}"):
        return  # the latter lies in one that is there already
    if os.path.islink(path) and path in _SYSTEM:
        Path(f"{root}{path}").parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.readlink(path), f"{root}{path}")
    else:
        kernel.make_read_only(_bind(path, root))


def _bind(path: str, root: Path) -> str:
    target = Path(f"{root}{path}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(path):
        target.mkdir()
    else:
        target.touch()
    kernel.mount(path, str(target), flags=kernel.MS_BIND | kernel.MS_REC)
    return str(target)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.set_dumpable()


def _become_nobody_in(folder: str) -> str:
    """The kernel does not count root's processes, so root becomes the user nobody where that one may read
    Python. Returns a folder for boxes."""
    boxes = os.path.join(folder, "boxes")
    os.mkdir(boxes, 0o700)
    if os.geteuid() == 0 and _nobody_reads(sys.prefix) and _nobody_reads(sys.base_prefix):
        os.chmod(folder, 0o711)
        os.chown(boxes, _NOBODY, _NOBODY)
        _become_nobody()
    return boxes


def _nobody_reads(path: str) -> bool:
    """Judges by the rights of others on the path and all folders above it."""
    real = Path(path).resolve()
    return all(each.stat().st_mode & 0o005 == 0o005 for each in (real, *real.parents))
