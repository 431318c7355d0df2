"""`laminar doctor` on installed packages: Python, torch, Megatron-core, SGLang and what they need. By their
metadata: none of them is imported."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

from laminar_hpc.launch.doctor.findings import CheckTable, Verdict, fail, ok, warn
from laminar_hpc.machine.compat import cuda_toolkit

CHECKS = CheckTable()


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


@cache
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


@CHECKS.row("python", "use 3.11 or 3.12")
def python() -> Verdict:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    return ok(text) if sys.version_info[:2] in ((3, 11), (3, 12)) else fail(text)


@CHECKS.row("compiler", "apt-get install g++")
def compiler() -> Verdict:
    """Triton builds its launchers with one."""
    found = shutil.which("c++") or shutil.which("g++")
    return ok(found) if found else warn("none found")


@CHECKS.row("torch", "make setup")
def torch() -> Verdict:
    """Which build of torch is installed, and whether it fits the GPUs that the driver shows."""
    version = installed("torch")
    if version is None:
        return fail("not installed")
    needs = " ".join(importlib.metadata.requires("torch") or [])
    named = (major for major in ("13", "12") if f"-cu{major}" in needs)
    cuda = version.partition("+cu")[2] or next(named, "")
    text = f"{version}, {f'built for CUDA {cuda}' if cuda and '+cpu' not in version else 'a CPU build'}"
    if pinned("torch") not in (None, version.split("+")[0]):
        return warn(text, f"tested with {pinned('torch')}: make setup")
    if "+cpu" in version and gpus():
        return warn(text, "this machine has a GPU: make setup CUDA=13")
    return ok(text)


@CHECKS.row("GPUs")
def graphics() -> Verdict:
    names = gpus()
    return ok(f"{len(names)} x {names[0]}" if names else "none; everything runs on the CPU, with gloo")


def package(name: str) -> Verdict:
    version, wanted = installed(name), pinned(name)
    if version is None:
        return fail("not installed")
    return ok(version) if wanted in (None, version) else warn(version, f"tested with {wanted}: make setup")


for each in ("megatron-core", "triton", "transformers"):
    CHECKS.row(each, "make setup")(partial(package, each))


@CHECKS.row("sglang", "make setup")
def sglang(has_gpu: bool | None = None) -> Verdict:
    """SGLang's version and what it will run on: its CUDA backend, or our CPU platform as a plugin."""
    version, kernels = installed("sglang"), installed("sglang-kernel")
    if version is None:
        return fail("not installed")
    if bool(gpus()) if has_gpu is None else has_gpu:
        if kernels is None:
            return fail(f"{version}, without its kernels", "make setup CUDA=13")
        return ok(f"{version}, on the GPU with sglang-kernel {kernels}")
    names = {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.platforms")}
    chosen = os.environ.get("SGLANG_PLATFORM", "")
    if "laminar_cpu" not in names:
        return fail(f"{version}, without our CPU platform")
    if chosen not in ("", "laminar_cpu"):
        return fail(f"{version}, SGLANG_PLATFORM={chosen}", "unset SGLANG_PLATFORM")
    if not chosen and len(names) > 1:
        return warn(f"{version}, platforms {', '.join(sorted(names))}", "export SGLANG_PLATFORM=laminar_cpu")
    return ok(f"{version}, on the CPU through the platform plugin laminar_cpu")


@CHECKS.row("CUDA compiler", "make setup CUDA=13")
def cuda_compiler(has_gpu: bool | None = None) -> Verdict:
    """What SGLang compiles its kernels with at an engine's first start on a GPU, against torch's CUDA."""
    if not (bool(gpus()) if has_gpu is None else has_gpu):
        return ok("not needed without a GPU")
    toolkit = cuda_toolkit.home()
    if toolkit is None:
        cure = "make setup CUDA=13, or set CUDA_HOME to a toolkit of torch's CUDA"
        return fail("none found; an engine cannot start", cure)
    release, runtime = cuda_toolkit.release(toolkit), installed("nvidia-cuda-runtime") or ""
    text = f"{release or 'unknown'}, at {toolkit}"
    if runtime and release != ".".join(runtime.split(".")[:2]):
        cure = "make setup CUDA=13: its headers refuse another compiler"
        return fail(f"{text}, while torch brings CUDA {runtime}", cure)
    if shutil.which("ninja", path=cuda_toolkit.variables()["PATH"]) is None:
        return fail(f"{text}, without ninja")
    return ok(text)


@CHECKS.row("KV migration", "apt-get install g++, then make setup")
def migration() -> Verdict:
    spec = importlib.util.find_spec("laminar_hpc._kv")
    if spec is None or spec.origin is None:
        return warn("laminar_hpc._kv was not built")
    return ok(f"{Path(spec.origin).name}, gathers and scatters on the CPU")


@CHECKS.row("apex", "pip uninstall apex")
def apex() -> Verdict:
    """NVIDIA's apex, told from the unrelated PyPI package by its optimizers."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ok("absent; Megatron uses torch's optimizer (on CUDA machines: make apex)")
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if any((place / "optimizers").is_dir() for place in places):
        return ok(f"NVIDIA's, at {places[0]}")
    return fail("PyPI's package of that name, which is something else")


@CHECKS.row("transformer-engine")
def transformer_engine() -> Verdict:
    return ok(installed("transformer-engine") or "absent; Megatron's own layers are used")
