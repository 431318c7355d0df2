"""What a machine without a network gets: GPU code of its own architecture only, and parts from which
unpack.sh makes an environment. No GPU is needed, and nothing is downloaded."""

import hashlib
import importlib.util
import mmap
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import triton

from helpers.paths import BENCH

CARRY = BENCH / "gpu_carry"
NVIDIA = Path(triton.__file__).parent / "backends/nvidia/bin"  # Triton's wheel has ptxas and cuobjdump
PTX = """
.version 8.0
.target sm_{arch}
.address_size 64
.visible .entry {name}() {{ ret; }}
"""


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The packer as `python bench/gpu_carry` has it."""
    monkeypatch.syspath_prepend(str(CARRY))
    for name in ("contents", "fatbins"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("gpu_carry_main", CARRY / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- GPU code ----------------------------------------------------------------------------------------------


def cubin(folder: Path, name: str, arch: int) -> bytes:
    """Machine code of an empty kernel."""
    source, built = folder / f"{name}_{arch}.ptx", folder / f"{name}_{arch}.cubin"
    source.write_text(PTX.format(arch=arch, name=name))
    subprocess.run([NVIDIA / "ptxas", f"-arch=sm_{arch}", source, "-o", built], check=True, timeout=60)
    return built.read_bytes()


@pytest.fixture
def library(carry: ModuleType, tmp_path: Path) -> Path:
    """A shared library with two containers, as nvcc's `-gencode` for sm_80, sm_90 and PTX writes them: one
    has the kernel `used`, the other `spare`."""
    fatbins, containers = sys.modules["fatbins"], []
    for name in ("used", "spare"):
        entries = b""
        for kind, arch in ((2, 80), (2, 90), (1, 90)):
            code = cubin(tmp_path, name, arch) if kind == 2 else PTX.format(arch=arch, name=name).encode()
            code += bytes(-len(code) % 8)
            # version 1.1, a header of 64 bytes, offset and size of options, version of the code
            head = fatbins.ENTRY.pack(kind, 0x101, 64, len(code), 0, 0, 0, 0, arch)
            entries += head.ljust(40, b"\0") + (0x11).to_bytes(8, "little") + bytes(16) + code
        containers.append(fatbins.CONTAINER.pack(fatbins.MAGIC, 1, 16, len(entries)) + entries)
    (tmp_path / "code.bin").write_bytes(bytes(8).join(containers))
    (tmp_path / "code.S").write_text(
        f'.section .nv_fatbin, "a"\n.incbin "{tmp_path}/code.bin"\n'
        '.section .debug_info\n.ascii "for debuggers"\n'
        ".text\n.globl answer\nanswer: mov $42, %eax\nret\n"
    )
    built = tmp_path / "library.so"
    subprocess.run(["gcc", "-shared", "-o", built, tmp_path / "code.S"], check=True, timeout=60)
    return built


def entries(library: Path) -> list[tuple[int, int, bytes]]:
    """Kind, architecture and payload of each entry of all containers."""
    fatbins = sys.modules["fatbins"]
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin, size = fatbins.section(data, ".nv_fatbin")
        found = [each for some in fatbins.containers(data, begin, begin + size) for each in some]
        return [(each.kind, each.arch, data[each.begin : each.begin + each.size]) for each in found]


def listed(library: Path, arch: str) -> int:
    """The number of entries with valid machine code of `arch`, by NVIDIA's own reader."""
    command = [NVIDIA / "cuobjdump", "-arch", arch, "--list-elf", library]
    return subprocess.run(command, capture_output=True, text=True).stdout.count(f"{arch}.cubin")


def test_only_code_of_one_architecture_stays(carry: ModuleType, library: Path) -> None:
    """Promise: sizes and offsets stay; the wanted code is as it was, all other is zeros, as is what only
    debuggers read; the toolkit finds the wanted code, and a process loads the library."""
    before, size = entries(library), library.stat().st_size
    assert listed(library, "sm_80") == listed(library, "sm_90") == 2
    assert [each[:2] for each in before] == [(2, 80), (2, 90), (1, 90)] * 2
    stay = sys.modules["fatbins"].keep(library, 90)
    after = entries(library)
    assert library.stat().st_size == size and b"for debuggers" not in library.read_bytes()
    for (kind, arch, old), (_, _, new) in zip(before, after, strict=True):
        assert new == (old if (kind, arch) == (2, 90) else bytes(len(old))), (kind, arch)
    assert stay == sum(len(code) for kind, arch, code in before if (kind, arch) == (2, 90))
    assert (listed(library, "sm_80"), listed(library, "sm_90")) == (0, 2)
    program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "42\n"


@pytest.mark.parametrize(("arch", "kept"), [(86, (2, 80)), (90, (2, 90)), (100, (1, 90)), (70, None)])
def test_the_code_that_the_driver_would_take_stays(
    carry: ModuleType, library: Path, arch: int, kept: tuple[int, int] | None
) -> None:
    """Promise: a GPU's own code, else that of an older one of its generation, else PTX, else none."""
    sys.modules["fatbins"].keep(library, arch)
    assert {each[:2] for each in entries(library) if any(each[2])} == ({kept} if kept else set())


def test_kernels_are_chosen_by_name(carry: ModuleType, library: Path) -> None:
    """Promise: with a pattern, code without such a kernel goes too, whatever its architecture."""
    sys.modules["fatbins"].keep(library, 90, re.compile(rb"\.text\.used"))
    assert [any(code) for _, _, code in entries(library)] == [False, True, False, False, False, False]


# ---- packages ----------------------------------------------------------------------------------------------


def test_what_the_target_has_is_not_carried(carry: ModuleType, tmp_path: Path) -> None:
    """Promise: every pin but those of the tables is carried, and the tables name pinned packages only; what
    the target has stays there, but for what must have the pinned version; an old numpy is refused."""
    contents = sys.modules["contents"]
    every = {name for file in carry.PINS for name in carry.pinned(file.read_text())}
    tables = {*contents.PROVIDED, *contents.LEFT_OUT, *contents.TOOLS}
    assert tables <= every and set(contents.EXACT) <= every - tables
    assert carry.chosen(carry.PINS, None).keys() == every - tables
    have = tmp_path / "have.txt"
    have.write_text("torch==2.11.0\nnumpy==2.5.2\nPyYAML==6.0.2\nunknown==1\n")
    assert carry.chosen(carry.PINS, have).keys() == every - tables - {"numpy", "pyyaml"}
    have.write_text("numpy==1.26.4\n")
    with pytest.raises(SystemExit, match=r"numpy==1.26.4 is older than the 2.0"):
        carry.chosen(carry.PINS, have)


def wheel(folder: Path) -> Path:
    """A wheel of the package `tiny-one` 1.5 with a module, a header that no run loads, and random bytes that
    take two parts."""
    folder.mkdir()
    path = folder / "tiny_one-1.5-py3-none-any.whl"
    info = "tiny_one-1.5.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_one.py", "VALUE = 15\n")
        archive.writestr("tiny_one_data/noise", os.urandom(1_500_000))
        archive.writestr("torch/include/unused.h", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-one\nVersion: 1.5\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)  # it compiles the extension
def test_from_parts_to_an_environment(
    carry: ModuleType, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the parts alone make an environment in which the carried package, the checkout with its
    extension and entry points, and this machine's own packages are found; a second call unpacks and builds
    nothing; a missing part, a damaged one, another Python and a .venv of other origin are one line each."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("LAMINAR_CUDA", "0")
    made, out, pins = wheel(tmp_path / "wheels"), tmp_path / "out", tmp_path / "pins.txt"
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    pins.write_text(f"tiny_one==1.5 \\\n    --hash=sha256:{digest}\ntriton==3.7.1\n")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = ["--wheels", made.parent, "--pins", pins, "--part-megabytes", 1, "--python", python]
    carry.main([str(word) for word in (out, *words)])
    assert sorted(path.name for path in out.iterdir()) == ["part-000", "part-001", "unpack.sh"]

    def unpack(program: str = sys.executable) -> subprocess.CompletedProcess:
        command = ["bash", str(out / "unpack.sh"), str(tree)]
        environment = {**os.environ, "PYTHON": program, "PYTHONPATH": str(tmp_path / "nowhere")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)

    def refusal(done: subprocess.CompletedProcess) -> str:
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done
        return done.stderr

    second = (out / "part-001").read_bytes()
    (out / "part-001").unlink()
    assert f"{out}/part-001 is missing: copy it there" in refusal(unpack())
    (out / "part-001").write_bytes(second[:-1])
    assert "a part is damaged: copy it again" in refusal(unpack())
    (out / "part-001").write_bytes(second)
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    assert f"the parts are for Python {python} and {other} is 3.9" in refusal(unpack(str(other)))

    done = unpack()
    assert done.returncode == 0, done
    stages = ("check sums of 2 parts", "unpacking", "environment", "packages", "extension", "ready")
    assert [
        line.partition(": ")[2].startswith(name)
        for line, name in zip(done.stdout.splitlines(), stages, strict=True)
    ] == [True] * 6, done.stdout
    carried = tree / ".venv/carried"
    assert (carried / "tiny_one.py").exists() and not (carried / "torch/include").exists()
    program = (
        "import tiny_one, laminar_hpc, laminar_hpc._kv, torch, importlib.metadata as m\n"
        "print(tiny_one.VALUE, laminar_hpc.__file__, *m.entry_points(group='sglang.srt.plugins').names)"
    )
    said = subprocess.run(
        [tree / ".venv/bin/python", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.stdout == f"15 {tree}/src/laminar_hpc/__init__.py laminar_port\n", said

    (built,) = (tree / "src/laminar_hpc").glob("_kv*.so")
    stamp = built.stat().st_mtime_ns
    done = unpack()
    assert (
        done.returncode == 0
        and not re.search("unpacking|extension", done.stdout)
        and built.stat().st_mtime_ns == stamp
    ), done
    carried.rename(tmp_path / "carried")
    assert ".venv was not made by unpack.sh: move it away" in refusal(unpack())
