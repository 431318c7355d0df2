"""Packs what laminar_hpc needs on a machine with an NVIDIA GPU and no network, into files of limited size.

    python bench/gpu_carry OUT_DIR                     part-000, part-001, ... and unpack.sh in OUT_DIR
    python bench/gpu_carry OUT_DIR --have target.txt   without what the target has: `pip list --format=freeze`
    python bench/gpu_carry OUT_DIR --wheels CACHE_DIR  takes wheels from there, and keeps new ones there

The packages are those of requirements/*.hashes for Linux, x86-64, less the tables of contents.py: the target
has CUDA 13's libraries and compiler, a torch of its own, Triton and Python. Of what is left no run loads
headers, static libraries and GPU code for other architectures. Copy the parts and unpack.sh into one folder
of the target, over as many transfers as it takes, and a checkout of this repository; there
`bash unpack.sh REPOSITORY` makes REPOSITORY/.venv and builds the extension.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from contents import DROPPED, EXACT, LEFT_OUT, NO_WHEEL, ONLY, PROVIDED, TOOLS, other_kernels
from fatbins import keep

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parents[1] / "requirements"
PINS = [REQUIREMENTS / f"{name}.hashes" for name in ("torch", "lock", "nodeps", "cuda13", "dev")]
GLIBC = 34  # 2.34, the newest that a pinned wheel asks for
SMALL = 1 << 20  # bytes; libraries below it are not worth a look
CARRIED = "carried.txt"  # in the archive: its packages, as `pip freeze` prints them


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    about = __doc__ or ""
    options = argparse.ArgumentParser(
        prog="python bench/gpu_carry",
        description=about.partition("\n\n")[0],
        epilog=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("out", type=Path, metavar="OUT_DIR", help="for the parts; new or empty")
    options.add_argument("--arch", type=int, default=90, help="the GPU's compute capability (default 90)")
    options.add_argument("--python", default="3.12", help="the target's Python (default %(default)s)")
    options.add_argument("--part-megabytes", type=int, default=50, help="at most (default %(default)s)")
    options.add_argument("--wheels", type=Path, metavar="CACHE_DIR", help="where wheels are kept")
    options.add_argument("--have", type=Path, metavar="FILE", help="the target's `pip list --format=freeze`")
    options.add_argument("--pins", type=Path, nargs="+", default=PINS, metavar="FILE", help=argparse.SUPPRESS)
    return options.parse_args(words)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Package to requirement of a file of pins, with the hashes where it has them."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if "==" in line and line[0] != "#"]
    return {canonical(line.partition("==")[0]): line for line in lines}


def chosen(files: list[Path], have: Path | None) -> dict[str, str]:
    """The pins of what is carried. Raises SystemExit where the target's numpy serves no pinned package."""
    pins: dict[str, str] = {}
    for file in files:
        pins.update(pinned(file.read_text()))
    there = pinned(have.read_text()) if have else {}
    if there.get("numpy", "==2.").partition("==")[2].startswith(("0.", "1.")):
        raise SystemExit(
            f"{have}: {there['numpy']} is older than the 2.0 that all needs; pack without --have"
        )
    absent = {*PROVIDED, *LEFT_OUT, *TOOLS, *(there.keys() - set(EXACT))}
    return {name: pin for name, pin in sorted(pins.items()) if name not in absent}


def pip(room: Path, *words: str | Path) -> None:
    """Lets pip unpack in `room`, as /tmp may be small. Raises SystemExit with pip's own error."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(room)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error" in line.lower()]
        raise SystemExit(f"pip {words[0]} failed: {' '.join((errors or [done.stdout])[-1].split())}")


def install(pins: dict[str, str], python: str, wheels: Path, tree: Path) -> None:
    """Downloads what `wheels` lacks, checks hashes, and unpacks all for the target's Python into `tree`."""
    glibc = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in (*glibc, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"):
        target += ["--platform", platform]
    local = ["--no-deps", "--find-links", wheels]
    room, lines, listed = tree.parent, tree.with_name("pins.txt"), tree / CARRIED
    lines.write_text("\n".join(pin for name, pin in pins.items() if name not in NO_WHEEL))
    pip(room, "download", *local, *target, "-d", wheels, "-r", lines)
    if sources := [pin for name, pin in pins.items() if name in NO_WHEEL]:
        lines.write_text("\n".join(sources))
        pip(room, "wheel", *local, "--no-build-isolation", "-w", wheels, "-r", lines)
    tree.mkdir()
    listed.write_text("".join(f"{pin.split()[0]}\n" for pin in pins.values()))
    pip(room, "install", *local, *target, "--no-index", "--no-compile", "--target", tree, "-r", listed)


def strip(tree: Path, arch: int) -> None:
    """Deletes and zeroes in `tree` what no run on a GPU of `arch` loads."""
    for pattern in (*DROPPED, other_kernels(arch)):
        for path in list(tree.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    for library in tree.rglob("*.so*"):
        if not library.is_symlink() and library.stat().st_size >= SMALL:
            keep(library, arch, ONLY.get(arch, {}).get(library.name))


def pack(tree: Path, out: Path, python: str, megabytes: int) -> int:
    """Writes the parts of `tree` and unpack.sh, which knows their check sums; returns the bytes of all
    parts."""
    tar = "tar c --sort=name --owner=0 --group=0 --mtime=@0 ."
    split = f"split -b {megabytes}MB -d -a 3 - {shlex.quote(str(out.resolve() / 'part-'))}"
    subprocess.run(["bash", "-c", f"set -o pipefail; {tar} | xz -T0 | {split}"], cwd=tree, check=True)
    parts = sorted(out.glob("part-*"))
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}" for part in parts]
    script = (HERE / "unpack.sh").read_text().replace("@PYTHON@", python).replace("@SUMS@", "\n".join(sums))
    (out / "unpack.sh").write_text(script)
    return sum(part.stat().st_size for part in parts)


def main(words: list[str] | None = None) -> None:
    options = options_of(words)
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        raise SystemExit(f"{options.out} is not empty: name a new folder, or delete what is in it")
    pins = chosen(options.pins, options.have)
    with tempfile.TemporaryDirectory(dir=options.out.resolve().parent) as room:
        wheels, tree = (options.wheels or Path(room) / "wheels").resolve(), Path(room) / "tree"
        wheels.mkdir(parents=True, exist_ok=True)
        print(f"{len(pins)} packages for Python {options.python}", flush=True)
        install(pins, options.python, wheels, tree)
        print(f"stripping for sm_{options.arch}", flush=True)
        strip(tree, options.arch)
        print("packing", flush=True)
        size = pack(tree, options.out, options.python, options.part_megabytes)
    print(
        f"{size / 1e6:.0f} MB in {len(list(options.out.iterdir())) - 1} parts, and unpack.sh: {options.out}"
    )


if __name__ == "__main__":
    main()
