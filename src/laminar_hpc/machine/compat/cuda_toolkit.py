"""CUDA's compiler: where it is, and a toolkit folder made of pip's wheels.

    python -m laminar_hpc.machine.compat.cuda_toolkit     makes the folder of this environment and prints its
    path

NVIDIA's wheels (requirements/cuda13.txt) lie in site-packages/nvidia/cu13, with libraries in lib/ and without
the plain names that linkers want. `make` puts links to them into a folder that looks like the toolkit's
installer's: bin, include, nvvm, lib64 with libcudart.so. setup.py, the doctor, requirements/setup.sh and the
engine's process use the same `home`. Imports the standard library only: setup.py loads this file by its path.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SECONDS = 20.0  # nvcc --version on a slow network file system
_DRIVERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib", "/usr/local/cuda/compat")


def wheels() -> Path | None:
    """The folder that the wheels of CUDA 13 share, None where its compiler is not among them."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    return folder if (folder / "bin" / "nvcc").is_file() else None


def home() -> Path | None:
    """The toolkit to compile with, None where there is none: that of this environment, made if need be, as
    only it is sure to fit torch; else CUDA_HOME or CUDA_PATH, nvcc's on PATH, or /usr/local/cuda."""
    return next((folder for folder in _candidates() if (folder / "bin" / "nvcc").is_file()), None)


def _candidates() -> Iterator[Path]:
    if source := wheels():
        own = Path(sys.prefix) / "cuda"
        try:
            yield make(source, own)
        except OSError:  # an environment that this user may not write to
            yield own
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if named := os.environ.get(variable):
            yield Path(named)
    if found := shutil.which("nvcc"):
        yield Path(found).resolve().parent.parent
    yield Path("/usr/local/cuda")


def make(source: Path, folder: Path) -> Path:
    """`folder` with links into the wheels' folder `source`; nothing where it is whole already. It appears at
    once: two processes may make it at the same time. Raises OSError."""
    if (folder / "lib64" / "libcudart.so").exists() and (folder / "bin" / "nvcc").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    fresh.chmod(0o755)
    for name in ("bin", "include", "nvvm"):
        (fresh / name).symlink_to(source / name)
    libraries = fresh / "lib64"
    (libraries / "stubs").mkdir(parents=True)
    (fresh / "lib").symlink_to("lib64")
    for file in sorted((source / "lib").iterdir()):
        (libraries / file.name).symlink_to(file)
        plain = libraries / f"{file.name.partition('.so.')[0]}.so"
        if ".so." in file.name and not plain.exists():
            plain.symlink_to(file)
    driver = next((p for p in (Path(d) / "libcuda.so.1" for d in _DRIVERS) if p.exists()), None)
    if driver is not None:
        (libraries / "stubs" / "libcuda.so").symlink_to(driver)
    if folder.exists():  # of wheels that have gone
        shutil.rmtree(folder)
    try:
        fresh.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(fresh)
    return folder


def variables() -> dict[str, str]:
    """What compiling for a GPU needs: CUDA_HOME, and PATH with nvcc and ninja; {} without a toolkit."""
    toolkit = home()
    if toolkit is None:
        return {}
    programs = [str(toolkit / "bin"), str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)]
    return {"CUDA_HOME": str(toolkit), "PATH": os.pathsep.join(programs)}


def release(toolkit: Path) -> str:
    """The compiler's version, for example 13.0; "" where it does not say."""
    try:
        said = subprocess.run(
            [toolkit / "bin" / "nvcc", "--version"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.partition("release ")[2].partition(",")[0]


if __name__ == "__main__":
    print(home() or "no CUDA compiler was found")
