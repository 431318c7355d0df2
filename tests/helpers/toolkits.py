"""CUDA's compiler from pip, for tests that compile for GPUs which are not here."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from helpers.paths import ROOT
from laminar_hpc.machine.compat import cuda_toolkit

PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime ninja".split()


def pinned() -> list[str]:
    """PACKAGES at the versions of requirements/cuda13.txt."""
    text = (ROOT / "requirements/cuda13.txt").read_text()
    return [re.search(rf"^{name}==\S+$", text, re.M)[0] for name in PACKAGES]


def toolkit(folder: Path) -> tuple[Path, Path]:
    """A toolkit folder, and the folder with ninja: of this environment where it has CUDA's compiler, else
    downloaded into `folder`."""
    if source := cuda_toolkit.wheels():
        return cuda_toolkit.make(source, folder / "cuda"), Path(sys.prefix) / "bin"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "wheels")]
    subprocess.run([*command, *pinned()], check=True, timeout=600)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    (programs,) = (folder / "site").glob("ninja-*.data/scripts")
    for place in (programs, folder / "site/nvidia/cu13/bin", folder / "site/nvidia/cu13/nvvm/bin"):
        for file in place.iterdir():
            file.chmod(0o755)
    return cuda_toolkit.make(folder / "site/nvidia/cu13", folder / "cuda"), programs
