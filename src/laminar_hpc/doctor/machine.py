"""`laminar doctor` on the machine: cores, memory, disks, the sandbox, the loopback interface, Slurm, and what
killed runs have left."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from laminar_hpc.cluster import leftovers
from laminar_hpc.cluster.host_memory import usable_memory
from laminar_hpc.config.file_systems import NETWORK_FILE_SYSTEMS, file_system
from laminar_hpc.doctor.findings import GIB, Finding, size_text, warned
from laminar_hpc.environments.isolation import landlock, tiers

# controller, relay, trainer, an SGLang server of three processes, and the page cache of their libraries
DEMO_MEMORY = 5 * GIB
DEMO_SHM = 32 * 2**20  # three weight slots of about 1 MB, SGLang's and gloo's own segments
DEMO_DISK = GIB
_BIND = "name its interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; docs/security.md"


def usable_cores() -> float:
    """Cores this process may use: its affinity, cut by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    return min(cores, int(quota[0]) / int(quota[1])) if len(quota) == 2 and quota[0] != "max" else cores


def machine() -> Iterator[Finding]:
    """Cores, memory, shared memory and the disk of the current folder."""
    cores, memory = usable_cores(), usable_memory()
    yield warned("cores", f"{cores:g}", "" if cores >= 2 else "the demo wants 2; it will be slow")
    yield Finding("ok" if memory >= DEMO_MEMORY else "warn", "memory", f"{memory / GIB:.1f} GiB free")
    shm = os.statvfs("/dev/shm")
    size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    cure = "a container's default; start it with --shm-size=8g" if size <= 64 * 2**20 else ""
    yield warned("/dev/shm", f"{size_text(size)}, {size_text(free)} free", cure)
    kind = file_system(Path.cwd())
    cure = "SQLite needs a local disk: set store_dir to one" if kind in NETWORK_FILE_SYSTEMS else ""
    yield warned("disk", f"{size_text(shutil.disk_usage('.').free)} free here, on {kind}", cure)


def trust() -> Iterator[Finding]:
    """What the machine cannot be asked: who else is on its network."""
    plain = "beyond one machine, torchrun, gloo and NCCL need a private network: no keys, no encryption"
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    bound = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    yield Finding("ok", "trust", plain + (f"; bound by {bound}" if bound else ""), "" if bound else _BIND)


def sandbox() -> Iterator[Finding]:
    """How far code that a model has written can be kept apart here; see docs/security.md."""
    if tier := tiers.best():
        known = landlock.version()
        with_it = f", Landlock {known}" if known else ", no Landlock"
        yield Finding("ok", "sandbox", {"namespaces": f"namespaces{with_it}"}.get(tier, f"landlock {known}"))
        return
    cure = "allow user namespaces (Linux 5.12) or Landlock (Linux 5.13) on this machine"
    yield warned("sandbox", f"none: {tiers.trouble('namespaces')}; {tiers.trouble('landlock')}", cure)


def left_behind(clean: bool = False) -> Iterator[Finding]:
    """What killed runs have left here, by kind; or, with `clean`, what of it has just been removed."""
    for each in leftovers.clean() if clean else ():
        yield Finding("ok", "removed", f"{each.what} {each.path}, {size_text(each.size)}")
    if not (remains := leftovers.find()):
        yield Finding("ok", "left behind", "nothing")
    elif clean:
        yield warned("left behind", ", ".join(str(each.path) for each in remains), "a process still has them")
    else:
        kinds: dict[str, list[int]] = {}
        for each in remains:
            kinds.setdefault(each.what, []).append(each.size)
        value = ", ".join(f"{what} of {len(all_)} ({size_text(sum(all_))})" for what, all_ in kinds.items())
        cure = "laminar doctor --clean, or the next start"
        yield warned("left behind", f"{value}, by runs that were killed", cure)


def network() -> Iterator[Finding]:
    """A free port of the loopback interface that accepts a connection."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            with socket.create_connection(probe.getsockname(), timeout=1):
                yield Finding("ok", "loopback", f"port {probe.getsockname()[1]} is free and can be reached")
    except OSError as error:
        yield Finding("FAIL", "loopback", f"no port of 127.0.0.1 can be used: {error}", "ip link set lo up")


def slurm() -> Iterator[Finding]:
    """Slurm's version where its commands are installed."""
    program = shutil.which("sbatch")
    if program is None:
        yield Finding("ok", "Slurm", "not found; runs start with laminar train or launch/")
        return
    try:
        out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=2, check=False)
        said = out.stdout
    except (subprocess.SubprocessError, OSError):  # it asks the network for its configuration
        said = ""
    if match := re.match(r"slurm[- ](\S+)", said):
        inside = "laminar slurm check looks at all nodes of this job"
        hint = inside if "SLURM_JOB_ID" in os.environ else "laminar submit starts a run"
        yield Finding("ok", "Slurm", f"{match.group(1)}; {hint}")
    else:
        text = "installed, but it names no cluster; runs start with laminar train or launch/"
        yield Finding("ok", "Slurm", text)


def demo() -> Iterator[Finding]:
    """Whether the arithmetic demo fits this machine."""
    shm = os.statvfs("/dev/shm")
    lacks = [
        f"{size_text(need)} of {what}"
        for what, need, have in (
            ("memory", DEMO_MEMORY, usable_memory()),
            ("/dev/shm", DEMO_SHM, shm.f_frsize * shm.f_bavail),
            ("disk", DEMO_DISK, shutil.disk_usage(".").free),
        )
        if have < need
    ]
    if lacks:
        text, cure = (
            f"does not fit: it needs {', '.join(lacks)}",
            "free them, or start the container with more",
        )
        yield Finding("FAIL", "demo", text, cure)
    else:
        yield Finding("ok", "demo", "fits: laminar train experiment=demo")


def _read(path: str) -> str:
    """A small file of /proc or /sys, empty where it does not exist."""
    return Path(path).read_text() if Path(path).exists() else ""
