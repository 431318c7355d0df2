"""`laminar doctor [--clean]`: one line for each thing a run needs from this machine, with the cure where
something is wrong.

It reads package metadata and /proc instead of importing torch or SGLang, so it answers in a second and also
where an import would crash. Each line is `ok|warn|FAIL  what: value  (cure)`; the exit code is 1 when a line
says FAIL. With --clean it removes what killed runs have left in shared memory and in the folder for temporary
files.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.cluster import leftovers
from laminar_hpc.compat import cuda_toolkit

GIB = 2**30
# controller, relay, trainer, an SGLang server of three processes, and the page cache of their libraries
DEMO_MEMORY = 5 * GIB
DEMO_SHM = 32 * 2**20  # three weight slots of about 1 MB, SGLang's and gloo's own segments
DEMO_DISK = GIB
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `level` is ok, warn or FAIL; `cure` is empty where nothing is to be done."""

    level: str
    what: str
    value: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}: {self.value}" + (f"  ({self.cure})" if self.cure else "")


def installed(package: str) -> str | None:
    """The installed version of a package by its metadata, None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned(package: str) -> str | None:
    """The version that this build of laminar_hpc was tested with, None where it states none."""
    for line in importlib.metadata.requires("laminar_hpc") or []:
        if match := re.match(rf"{re.escape(package)}==([^ ;]+)", line):
            return match.group(1)
    return None


def gpus() -> list[str]:
    """The names of the NVIDIA GPUs, empty where there is none or no driver."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    try:
        out = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=2, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.split(": ", 1)[-1].split(" (")[0] for line in out.splitlines() if line.startswith("GPU ")]


def usable_cores() -> float:
    """Cores this process may use: its affinity, cut by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    return min(cores, int(quota[0]) / int(quota[1])) if len(quota) == 2 and quota[0] != "max" else cores


def usable_memory() -> int:
    """Bytes of memory that are free for new processes, cut by the container's limit."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(available, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else available


def python_and_compiler() -> Iterator[Finding]:
    """Python's version, and a C++ compiler: Triton builds its launchers with one."""
    version = sys.version_info[:2]
    fits = version in ((3, 11), (3, 12))
    yield Finding(
        "ok" if fits else "FAIL",
        "python",
        f"{sys.version.split()[0]} at {sys.executable}",
        "" if fits else "use 3.11 or 3.12",
    )
    compiler = shutil.which("c++") or shutil.which("g++")
    yield (
        Finding("ok", "compiler", compiler)
        if compiler
        else Finding("warn", "compiler", "none found", "apt-get install g++")
    )


def torch_and_gpus() -> Iterator[Finding]:
    """Which build of torch is installed, and whether it fits the GPUs that the driver shows."""
    version, names = installed("torch"), gpus()
    if version is None:
        yield Finding("FAIL", "torch", "not installed", "make setup")
        return
    needs = " ".join(importlib.metadata.requires("torch") or [])
    cuda = version.partition("+cu")[2] or next(
        (major for major in ("13", "12") if f"-cu{major}" in needs), ""
    )
    build = f"{version}, {f'built for CUDA {cuda}' if cuda and '+cpu' not in version else 'a CPU build'}"
    wanted = pinned("torch")
    if wanted and version.split("+")[0] != wanted:
        yield Finding("warn", "torch", build, f"tested with {wanted}: make setup")
    elif names and "+cpu" in version:
        yield Finding("warn", "torch", build, "this machine has a GPU: make setup CUDA=13")
    else:
        yield Finding("ok", "torch", build)
    yield Finding(
        "ok", "GPUs", f"{len(names)} x {names[0]}" if names else "none; everything runs on the CPU, with gloo"
    )


def engines() -> Iterator[Finding]:
    """Megatron-core, SGLang and what they take along, against the tested versions."""
    for package in ("megatron-core", "triton", "transformers"):
        version, wanted = installed(package), pinned(package)
        if version is None:
            yield Finding("FAIL", package, "not installed", "make setup")
        else:
            same = wanted in (None, version)
            yield Finding(
                "ok" if same else "warn",
                package,
                version,
                "" if same else f"tested with {wanted}: make setup",
            )
    has_gpu = bool(gpus())
    yield sglang(has_gpu)
    yield cuda_compiler(has_gpu)
    yield migration()
    yield apex()
    engine = installed("transformer-engine")
    yield Finding("ok", "transformer-engine", engine or "absent; Megatron's own layers are used")


def sglang(has_gpu: bool) -> Finding:
    """SGLang's version and what it will run on: its CUDA backend, or our CPU platform through its entry
    point."""
    version = installed("sglang")
    if version is None:
        return Finding("FAIL", "sglang", "not installed", "make setup")
    if has_gpu:
        kernels = installed("sglang-kernel")
        if kernels is None:
            return Finding("FAIL", "sglang", f"{version}, without its kernels", "make setup CUDA=13")
        return Finding("ok", "sglang", f"{version}, on the GPU with sglang-kernel {kernels}")
    names = {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.platforms")}
    chosen = os.environ.get("SGLANG_PLATFORM", "")
    if "laminar_cpu" not in names:
        return Finding("FAIL", "sglang", f"{version}, without our CPU platform", "make setup")
    if chosen not in ("", "laminar_cpu"):
        return Finding("FAIL", "sglang", f"{version}, SGLANG_PLATFORM={chosen}", "unset SGLANG_PLATFORM")
    if not chosen and len(names) > 1:
        return Finding(
            "warn",
            "sglang",
            f"{version}, platforms {', '.join(sorted(names))}",
            "export SGLANG_PLATFORM=laminar_cpu",
        )
    return Finding("ok", "sglang", f"{version}, on the CPU through the platform plugin laminar_cpu")


def cuda_compiler(has_gpu: bool) -> Finding:
    """What SGLang compiles its kernels with at an engine's first start on a GPU, against torch's CUDA."""
    if not has_gpu:
        return Finding("ok", "CUDA compiler", "not needed without a GPU")
    toolkit = cuda_toolkit.home()
    if toolkit is None:
        cure = "make setup CUDA=13, or set CUDA_HOME to a toolkit of torch's CUDA"
        return Finding("FAIL", "CUDA compiler", "none found; an engine cannot start", cure)
    release, runtime = cuda_toolkit.release(toolkit), installed("nvidia-cuda-runtime") or ""
    text = f"{release or 'unknown'}, at {toolkit}"
    if runtime and release != ".".join(runtime.split(".")[:2]):
        cure = "make setup CUDA=13: its headers refuse another compiler"
        return Finding("FAIL", "CUDA compiler", f"{text}, while torch brings CUDA {runtime}", cure)
    if shutil.which("ninja", path=cuda_toolkit.variables()["PATH"]) is None:
        return Finding("FAIL", "CUDA compiler", f"{text}, without ninja", "make setup CUDA=13")
    return Finding("ok", "CUDA compiler", text)


def migration() -> Finding:
    """Whether the C++ extension for KV-cache migration was built."""
    spec = importlib.util.find_spec("laminar_hpc._kv")
    if spec is None or spec.origin is None:
        return Finding(
            "warn", "KV migration", "laminar_hpc._kv was not built", "apt-get install g++, then make setup"
        )
    return Finding("ok", "KV migration", f"{Path(spec.origin).name}, gathers and scatters on the CPU")


def apex() -> Finding:
    """NVIDIA's apex, told from the unrelated PyPI package by its optimizers."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("ok", "apex", "absent; Megatron uses torch's optimizer (on CUDA machines: make apex)")
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if any((place / "optimizers").is_dir() for place in places):
        return Finding("ok", "apex", f"NVIDIA's, at {places[0]}")
    return Finding(
        "FAIL", "apex", "PyPI's package of that name, which is something else", "pip uninstall apex"
    )


def machine() -> Iterator[Finding]:
    """Cores, memory, shared memory and the disk of the current folder."""
    cores, memory = usable_cores(), usable_memory()
    yield Finding(
        "ok" if cores >= 2 else "warn",
        "cores",
        f"{cores:g}",
        "" if cores >= 2 else "the demo wants 2; it will be slow",
    )
    yield Finding("ok" if memory >= DEMO_MEMORY else "warn", "memory", f"{memory / GIB:.1f} GiB free")
    shm = os.statvfs("/dev/shm")
    size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    small = size <= 64 * 2**20
    cure = "a container's default; start it with --shm-size=8g" if small else ""
    yield Finding("warn" if small else "ok", "/dev/shm", f"{_bytes(size)}, {_bytes(free)} free", cure)
    kind = _file_system(Path.cwd())
    network = kind in NETWORK_FILE_SYSTEMS
    cure = "SQLite needs a local disk: set store_dir to one" if network else ""
    yield Finding(
        "warn" if network else "ok",
        "disk",
        f"{_bytes(shutil.disk_usage('.').free)} free here, on {kind}",
        cure,
    )


def left_behind(clean: bool = False) -> Iterator[Finding]:
    """What killed runs have left here, by kind; or, with `clean`, what of it has just been removed."""
    remains = leftovers.clean() if clean else leftovers.find()
    kinds = {
        what: [each.size for each in remains if each.what == what]
        for what in dict.fromkeys(each.what for each in remains)
    }
    value = ", ".join(f"{what} of {len(sizes)} ({_bytes(sum(sizes))})" for what, sizes in kinds.items())
    if clean:
        for each in remains:
            yield Finding("ok", "removed", f"{each.what} {each.path}, {_bytes(each.size)}")
        remains = leftovers.find()
        value = ", ".join(str(each.path) for each in remains)
        yield (
            Finding("warn", "left behind", value, "a process still has them")
            if remains
            else Finding("ok", "left behind", "nothing")
        )
    elif remains:
        yield Finding(
            "warn",
            "left behind",
            f"{value}, by runs that were killed",
            "laminar doctor --clean, or the next start",
        )
    else:
        yield Finding("ok", "left behind", "nothing")


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
    out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=2, check=False)
    if match := re.match(r"slurm[- ](\S+)", out.stdout):
        yield Finding("ok", "Slurm", f"{match.group(1)}; slurm/ has the job scripts")
    else:
        yield Finding(
            "ok", "Slurm", "installed, but it names no cluster; runs start with laminar train or launch/"
        )


def demo() -> Iterator[Finding]:
    """Whether the arithmetic demo fits this machine."""
    shm = os.statvfs("/dev/shm")
    lacks = [
        f"{_bytes(need)} of {what}"
        for what, need, have in (
            ("memory", DEMO_MEMORY, usable_memory()),
            ("/dev/shm", DEMO_SHM, shm.f_frsize * shm.f_bavail),
            ("disk", DEMO_DISK, shutil.disk_usage(".").free),
        )
        if have < need
    ]
    if lacks:
        yield Finding(
            "FAIL",
            "demo",
            f"does not fit: it needs {', '.join(lacks)}",
            "free them, or start the container with more",
        )
    else:
        yield Finding("ok", "demo", "fits: laminar train experiment=demo")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python_and_compiler,
    torch_and_gpus,
    engines,
    left_behind,
    machine,
    network,
    slurm,
    demo,
)


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if one of them is a FAIL, 2 for other arguments than --clean."""
    if argv not in ([], ["--clean"]):
        print("usage: laminar doctor [--clean]", file=sys.stderr)
        return 2
    failed = False
    for check in CHECKS:
        for finding in check(True) if argv and check is left_behind else check():
            print(finding, flush=True)
            failed |= finding.level == "FAIL"
    return int(failed)


def _read(path: str) -> str:
    """A small file of /proc or /sys, empty where it does not exist."""
    return Path(path).read_text() if Path(path).exists() else ""


def _bytes(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, by its longest mount point."""
    mounts = [line.split()[1:3] for line in _read("/proc/mounts").splitlines()]
    inside = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(inside)[1] if inside else "unknown"
