"""`laminar doctor` on installed packages: Python, torch, Megatron-core, SGLang and what they need. By their
metadata: none of them is imported."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from laminar_hpc.compat import cuda_toolkit
from laminar_hpc.doctor.findings import Finding, warned


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


def python_and_compiler() -> Iterator[Finding]:
    """Python's version, and a C++ compiler: Triton builds its launchers with one."""
    version = sys.version_info[:2]
    level, cure = ("ok", "") if version in ((3, 11), (3, 12)) else ("FAIL", "use 3.11 or 3.12")
    yield Finding(level, "python", f"{sys.version.split()[0]} at {sys.executable}", cure)
    compiler = shutil.which("c++") or shutil.which("g++")
    yield warned("compiler", compiler or "none found", "" if compiler else "apt-get install g++")


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
    cure = "this machine has a GPU: make setup CUDA=13" if names and "+cpu" in version else ""
    if wanted and version.split("+")[0] != wanted:
        cure = f"tested with {wanted}: make setup"
    yield warned("torch", build, cure)
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
            cure = "" if wanted in (None, version) else f"tested with {wanted}: make setup"
            yield warned(package, version, cure)
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
        text = f"{version}, platforms {', '.join(sorted(names))}"
        return warned("sglang", text, "export SGLANG_PLATFORM=laminar_cpu")
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
        cure = "apt-get install g++, then make setup"
        return warned("KV migration", "laminar_hpc._kv was not built", cure)
    return Finding("ok", "KV migration", f"{Path(spec.origin).name}, gathers and scatters on the CPU")


def apex() -> Finding:
    """NVIDIA's apex, told from the unrelated PyPI package by its optimizers."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("ok", "apex", "absent; Megatron uses torch's optimizer (on CUDA machines: make apex)")
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if any((place / "optimizers").is_dir() for place in places):
        return Finding("ok", "apex", f"NVIDIA's, at {places[0]}")
    text = "PyPI's package of that name, which is something else"
    return Finding("FAIL", "apex", text, "pip uninstall apex")
