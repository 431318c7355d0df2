"""Packaging of laminar_hpc: the command, the two SGLang entry points, the configuration files, and the exact
pins.

`make setup` installs this with --no-deps after requirements/*.txt, which is the environment the tests run in.
A plain `pip install laminar_hpc[cuda13]` takes the same pins from the same files. Pins are read, never
written twice.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent

# What src/laminar_hpc itself imports; lock.txt holds the version of each, and of everything they bring along.
DIRECT = (
    "aiohttp datasets httpx huggingface-hub hydra-core jinja2 math-verify megatron-core msgspec "
    "numpy omegaconf pandas prometheus-client psutil pyarrow pydantic pyyaml pyzmq rich safetensors sympy "
    "tensorboardX tokenizers transformers"
).split()


def pins(name: str) -> list[str]:
    """The requirement lines of requirements/NAME.txt, without comments."""
    lines = (HERE / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def kernels(name: str) -> list[str]:
    """The extra NAME: the pins of nodeps.txt, with requirements/NAME.txt before them where both name a
    package."""
    chosen = {line.split("==")[0]: line for line in [*pins("nodeps"), *pins(name)]}
    # A resolver would refuse two of them beside SGLang's own metadata, which names a candidate of cuda-tile,
    # and CUDA 13 packages even for 0.5.19, the last release that runs on CUDA 12. `make setup` installs both
    # with --no-deps.
    return [
        line for line in chosen.values() if line != "sglang==0.5.19" and not line.startswith("cuda-tile==")
    ]


def direct_pins() -> list[str]:
    """torch and the packages of DIRECT, each at the version that lock.txt pins."""
    locked = {line.split("==")[0].lower().replace("_", "-"): line for line in pins("lock")}
    return pins("torch") + [locked[name.lower()] for name in DIRECT]


def version() -> str:
    """The version string of src/laminar_hpc/__init__.py."""
    found = re.search(r'^__version__ = "([^"]+)"', (HERE / "src/laminar_hpc/__init__.py").read_text(), re.M)
    assert found, "src/laminar_hpc/__init__.py has no __version__"
    return found.group(1)


LEFT_OUT = {
    "laminar_hpc._kv": "KV-cache migration",
    "laminar_hpc._sums": "check sums at the speed of memory",
    "laminar_hpc._rows": "model.deterministic on the CPU",
}


def wants_cuda() -> bool:
    """Whether the GPU part is built: where torch is a CUDA build, or as LAMINAR_CUDA=0|1 says."""
    if said := os.environ.get("LAMINAR_CUDA"):
        return said == "1"
    try:
        import torch
    except ImportError:  # an isolated build: the C++ part serves pools in host memory
        return False
    return torch.version.cuda is not None


def cuda_toolkit() -> ModuleType:
    """src/laminar_hpc/machine/compat/cuda_toolkit.py, by its path: the package is not installed yet."""
    path = HERE / "src/laminar_hpc/machine/compat/cuda_toolkit.py"
    spec = importlib.util.spec_from_file_location("cuda_toolkit", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildExtension(build_ext):
    """Builds what it can: without a C++ compiler KV-cache migration is left out and weights move slower, and
    one line says so; without nvcc the migration lacks its GPU part."""

    def build_extension(self, ext: Extension) -> None:
        try:
            if ext is migration and wants_cuda():
                self.add_cuda(ext)
        except Exception as error:
            print(
                f"laminar_hpc: {ext.name} is built without its GPU part (csrc/device.cu): "
                f"{' '.join(str(error).split())}",
                file=sys.stderr,
            )
        try:
            super().build_extension(ext)
        except Exception as error:  # distutils and the compiler raise many kinds
            text = (
                f"laminar_hpc: installed without {ext.name} ({LEFT_OUT[ext.name]}): {error}; apt-get "
                "install g++, then install again"
            )
            print(" ".join(text.split()), file=sys.stderr)

    def add_cuda(self, ext: Extension) -> None:
        """Compiles csrc/device.cu and links it, with CUDA's runtime inside, so that any driver's machine can
        load the result."""
        toolkit = cuda_toolkit().home()
        if toolkit is None:
            raise FileNotFoundError("there is no nvcc; make setup CUDA=13, or set CUDA_HOME")
        nvcc = str(toolkit / "bin" / "nvcc")
        built = Path(self.build_temp).absolute() / "device.o"
        built.parent.mkdir(parents=True, exist_ok=True)
        command = [nvcc, *NVCC_FLAGS, "-c", str(HERE / "csrc/device.cu"), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"nvcc ended with {done.returncode}")
        ext.define_macros = [*ext.define_macros, ("LAMINAR_CUDA", "1")]
        ext.extra_objects = [*ext.extra_objects, str(built)]
        ext.library_dirs = [
            *ext.library_dirs,
            str(toolkit / "lib64"),
            str(toolkit / "targets" / "x86_64-linux" / "lib"),
        ]
        ext.libraries = [*ext.libraries, "cudart_static", "dl", "rt"]


# A100 and its kin, Hopper, and Hopper's PTX, which the driver compiles for later GPUs
ARCHITECTURES = ("compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90")
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
NVCC_FLAGS += [word for each in ARCHITECTURES for word in ("-gencode", f"arch={each}")]

migration = Extension(
    "laminar_hpc._kv",
    sources=[f"csrc/{name}.cpp" for name in ("chunks", "copy", "module", "ring")],
    depends=[f"csrc/{name}.h" for name in ("chunks", "copy", "device", "ring")] + ["csrc/device.cu"],
    language="c++",
    py_limited_api=True,
    extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-g0", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,  # an install without the file that could not be built is a good one
)

sums = Extension(
    "laminar_hpc._sums",
    sources=["csrc/sums.cpp", "csrc/delta.cpp"],
    depends=["csrc/delta.h"],
    language="c++",
    py_limited_api=True,
    extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-g0", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)

rows = Extension(
    "laminar_hpc._rows",
    sources=["csrc/rows.cpp"],
    depends=["csrc/rows_kernels.h"],
    language="c++",
    py_limited_api=True,
    # a product is added with one rounding wherever the processor can, also at the end of a row
    extra_compile_args=[
        *("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-g0", "-pthread"),
        "-Wno-psabi",  # vectors are passed within the file only
    ],
    extra_link_args=["-pthread"],
    optional=True,
)


def folders(*patterns: str) -> list[str]:
    """As packages inside laminar_hpc, the folders of the source tree that hold such files."""
    found = {path.parent.relative_to(HERE) for pattern in patterns for path in HERE.glob(pattern)}
    return [".".join(["laminar_hpc", *folder.parts]) for folder in sorted(found)]


conf, slurm = folders("conf/**/*.yaml"), folders("slurm/*.sbatch")
# for experiment=demo, experiment=moe and laminar init
examples = folders("examples/*/data/*.jsonl", "examples/*/*/config.json")

setup(
    name="laminar_hpc",
    version=version(),
    description="Asynchronous RL post-training of language models on Megatron-core, SGLang and NCCL, after "
    "Laminar (EuroSys '26)",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    package_dir={"": "src", **{f"laminar_hpc.{name}": name for name in ("conf", "examples", "slurm")}},
    packages=[*find_packages("src"), *conf, *examples, *slurm],
    package_data={
        **{name: ["*.yaml"] for name in conf},
        **{name: ["*.json", "*.jsonl", "*.jinja", "*.safetensors"] for name in examples},
        **{name: ["*.sbatch", "*.sh"] for name in slurm},
        "laminar_hpc.report": ["*.css", "*.js"],
        "laminar_hpc.report.prometheus": ["grafana.json"],
        "laminar_hpc.launch.project": ["template/**/*"],
    },
    include_package_data=False,
    ext_modules=[migration, sums, rows],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    install_requires=direct_pins(),
    extras_require={
        "cuda12": kernels("cuda12"),
        "cuda13": kernels("cuda13"),
        "test": pins("dev"),
    },
    entry_points={
        "console_scripts": ["laminar = laminar_hpc.launch.cli:main"],
        "sglang.srt.platforms": ["laminar_cpu = laminar_hpc.engine.sglang.plugin.platform:activate"],
        "sglang.srt.plugins": ["laminar_port = laminar_hpc.engine.sglang.plugin.hooks:register"],
    },
)
