"""`laminar doctor` on the machine: cores, memory, disks, the sandbox, the loopback interface, Slurm, and what
killed runs have left."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from laminar_hpc.config.file_systems import NETWORK_FILE_SYSTEMS, file_system
from laminar_hpc.engine import leftovers
from laminar_hpc.environments.isolation import landlock, tiers
from laminar_hpc.launch.doctor.findings import GIB, CheckTable, Verdict, fail, ok, size_text, warn
from laminar_hpc.machine.host_memory import usable_memory

# controller, relay, trainer, an SGLang server of three processes, and the page cache of their libraries
DEMO_MEMORY = 5 * GIB
DEMO_SHM = 32 * 2**20  # three weight slots of about 1 MB, SGLang's and gloo's own segments
DEMO_DISK = GIB
SMALL_SHM = 64 * 2**20  # a container's default
_BIND = "name its interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; docs/security.md"

CHECKS = CheckTable()


@CHECKS.row("left behind", "laminar doctor --clean, or the next start; what stays then, a process still has")
def left_behind() -> Verdict:
    kinds: dict[str, list[int]] = {}
    for each in leftovers.find():
        kinds.setdefault(each.what, []).append(each.size)
    if not kinds:
        return ok("nothing")
    texts = [f"{what} of {len(sizes)} ({size_text(sum(sizes))})" for what, sizes in kinds.items()]
    return warn(f"{', '.join(texts)}, by runs that were killed")


@CHECKS.row("cores", "the demo wants 2; it will be slow")
def cores() -> Verdict:
    """What this process may use: its affinity, cut by the container's quota."""
    count, path = float(len(os.sched_getaffinity(0))), Path("/sys/fs/cgroup/cpu.max")
    quota = path.read_text().split() if path.exists() else []
    if len(quota) == 2 and quota[0] != "max":
        count = min(count, int(quota[0]) / int(quota[1]))
    return ok(f"{count:g}") if count >= 2 else warn(f"{count:g}")


@CHECKS.row("memory")
def memory() -> Verdict:
    free = usable_memory()
    return (ok if free >= DEMO_MEMORY else warn)(f"{free / GIB:.1f} GiB free")


def shared_memory() -> tuple[int, int]:
    """(size, free) of /dev/shm."""
    shm = os.statvfs("/dev/shm")
    return shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail


@CHECKS.row("/dev/shm", "a container's default; start it with --shm-size=8g")
def shm() -> Verdict:
    size, free = shared_memory()
    return (warn if size <= SMALL_SHM else ok)(f"{size_text(size)}, {size_text(free)} free")


@CHECKS.row("disk", "SQLite needs a local disk: set store_dir to one")
def disk() -> Verdict:
    kind = file_system(Path.cwd())
    text = f"{size_text(shutil.disk_usage('.').free)} free here, on {kind}"
    return (warn if kind in NETWORK_FILE_SYSTEMS else ok)(text)


@CHECKS.row("sandbox", "allow user namespaces (Linux 5.12) or Landlock (Linux 5.13) on this machine")
def sandbox() -> Verdict:
    """How far code that a model has written can be kept apart here; see docs/security.md."""
    known = landlock.version()
    match tiers.best():
        case "namespaces":
            return ok(f"namespaces, Landlock {known}" if known else "namespaces, no Landlock")
        case tier if tier:
            return ok(f"landlock {known}")
    return warn(f"none: {tiers.trouble('namespaces')}; {tiers.trouble('landlock')}")


@CHECKS.row("loopback", "ip link set lo up")
def loopback() -> Verdict:
    """A free port of the loopback interface that accepts a connection."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            with socket.create_connection(probe.getsockname(), timeout=1):
                return ok(f"port {probe.getsockname()[1]} is free and can be reached")
    except OSError as error:
        return fail(f"no port of 127.0.0.1 can be used: {error}")


@CHECKS.row("trust")
def trust() -> Verdict:
    """What the machine cannot be asked: who else is on its network."""
    plain = "beyond one machine, torchrun, gloo and NCCL need a private network: no keys, no encryption"
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    bound = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return ok(f"{plain}; bound by {bound}") if bound else ok(plain, _BIND)


@CHECKS.row("Slurm")
def slurm() -> Verdict:
    program, starts = shutil.which("sbatch"), "runs start with laminar train or launch/"
    if program is None:
        return ok(f"not found; {starts}")
    try:
        out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=2, check=False)
        match = re.match(r"slurm[- ](\S+)", out.stdout)
    except (subprocess.SubprocessError, OSError):  # it asks the network for its configuration
        match = None
    if match is None:
        return ok(f"installed, but it names no cluster; {starts}")
    inside = "laminar slurm check looks at all nodes of this job"
    return ok(f"{match[1]}; {inside if 'SLURM_JOB_ID' in os.environ else 'laminar submit starts a run'}")


@CHECKS.row("demo", "free them, or start the container with more")
def demo() -> Verdict:
    needs = (
        ("memory", DEMO_MEMORY, usable_memory()),
        ("/dev/shm", DEMO_SHM, shared_memory()[1]),
        ("disk", DEMO_DISK, shutil.disk_usage(".").free),
    )
    if lacks := [f"{size_text(need)} of {what}" for what, need, have in needs if have < need]:
        return fail(f"does not fit: it needs {', '.join(lacks)}")
    return ok("fits: laminar train experiment=demo")
