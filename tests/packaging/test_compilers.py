"""All that is compiled for GPUs, compiled and linked with the pinned compiler from pip, for GPUs that are not
here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from helpers.paths import ROOT, TESTS
from helpers.toolkits import toolkit
from laminar_hpc.machine.compat import cuda_toolkit

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BUILD = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib"]


def test_the_wheels_become_a_toolkit(tmp_path: Path) -> None:
    """Promise: what SGLang and flashinfer look for (lib64, plain names of libraries, the driver's stub) is
    there, once; a folder whose wheels have gone is made anew; CUDA_HOME comes second."""
    source = tmp_path / "wheels"
    for file in (
        "bin/nvcc",
        "include/cuda.h",
        "nvvm/bin/cicc",
        "lib/libcudart.so.13",
        "lib/libcudart_static.a",
    ):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).touch()
    folder = cuda_toolkit.make(source, tmp_path / "venv/cuda")
    for file in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib64/libcudart.so", "lib/libcudart.so.13"):
        assert (folder / file).exists(), file
    assert (folder / "lib64/stubs").is_dir()
    before = folder.stat().st_ino
    assert cuda_toolkit.make(source, folder).stat().st_ino == before
    moved = source.rename(tmp_path / "newer")
    assert (cuda_toolkit.make(moved, folder) / "lib64/libcudart.so").exists()
    assert not list((tmp_path / "venv").glob(".cuda-*"))


def test_the_environments_own_compiler_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a module's CUDA_HOME of another release is not taken where the wheels are; without them it is,
    and its programs and ninja come first on PATH."""
    for place in ("own/bin/nvcc", "own/lib/libcudart.so.13", "named/bin/nvcc"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(cuda_toolkit, "wheels", lambda: None)
    assert cuda_toolkit.home() == tmp_path / "named"
    monkeypatch.setattr(cuda_toolkit, "wheels", lambda: tmp_path / "own")
    told = cuda_toolkit.variables()
    assert told["CUDA_HOME"] == str(tmp_path / "venv/cuda")
    assert told["PATH"].split(":")[:2] == [str(tmp_path / "venv/cuda/bin"), str(tmp_path / "venv/bin")]


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that name the pinned toolkit."""
    home, programs = toolkit(tmp_path_factory.mktemp("cuda"))
    assert cuda_toolkit.release(home) == "13.0"
    path = os.pathsep.join([str(home / "bin"), str(programs), os.environ["PATH"]])
    return {**os.environ, "CUDA_HOME": str(home), "PATH": path}


@pytest.mark.slow
def test_the_extension_is_built_for_all_gpus(compiler: dict[str, str], tmp_path: Path) -> None:
    """Promise: setup.py compiles csrc/device.cu for sm_80, sm_90 and as PTX, which sm_100 takes, and links it
    into an extension that loads without a driver, and refuses there."""
    done = subprocess.run(
        [*BUILD, str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env={**compiler, "LAMINAR_CUDA": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0 and "without its GPU part" not in done.stderr, done.stderr
    (built,) = (tmp_path / "lib/laminar_hpc").glob("_kv*.so")
    for listed, names in (("-lelf", ["sm_80", "sm_90"]), ("-lptx", ["sm_90"])):
        said = subprocess.run([CUOBJDUMP, listed, built], capture_output=True, text=True, check=True).stdout
        assert [name for name in ("sm_80", "sm_90", "sm_100") if name in said] == names, said
    nvcc = [f"{compiler['CUDA_HOME']}/bin/nvcc", "-std=c++17", "-arch=sm_100", "-cubin"]
    subprocess.run([*nvcc, str(ROOT / "csrc/device.cu"), "-o", str(tmp_path / "device.cubin")], check=True)
    program = f"""
import importlib.util as util
spec = util.spec_from_file_location("laminar_hpc._kv", {str(built)!r})
kv = util.module_from_spec(spec)
spec.loader.exec_module(kv)
try:
    kv.device_share(64)
    print("shared")
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(("CUDA error", "shared"))


UNITS = """
import ctypes, os, sys
sys.path.insert(0, {folder!r})
import laminar_hpc.machine.compat.torchvision, tvm_ffi
import torch
from helpers.engines import resolved_arguments
sys.meta_path.append(resolved_arguments.KernelPackages())
resolved_arguments.pretend({gpu!r})
ctypes.CDLL(os.environ["CUDA_HOME"] + "/lib64/libcudart.so", mode=ctypes.RTLD_GLOBAL)  # torch's, on a GPU
from laminar_hpc.engine.sglang.plugin.compile_units import compile_units, sglang_units
failures = compile_units(list(sglang_units({shapes})))
sys.exit("\\n".join(failures) or None)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("gpu", "shapes"),
    [
        ("A100", "((torch.bfloat16, 128, 1024),)"),
        ("H100", "((torch.float32, 32, 256), (torch.bfloat16, 64, 512))"),
        ("B200", "((torch.bfloat16, 128, 1024),)"),
    ],
)
def test_sglangs_units_compile_and_link(
    compiler: dict[str, str], tmp_path: Path, gpu: str, shapes: str
) -> None:
    """Promise: an engine's first start, and `make setup` before it, compile SGLang's kernels for the GPU,
    link and load them, for the shapes of the shipped experiments."""
    program = UNITS.format(folder=str(TESTS), gpu=gpu, shapes=shapes)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**compiler, "SGLANG_JIT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.rglob("*.so"))) == done.stdout.count(" s\n") >= 4, done.stdout
