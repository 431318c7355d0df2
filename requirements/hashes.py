"""Writes requirements/FILE.hashes: the pins of FILE.txt with the SHA-256 of each of their files that may be
installed here, as an index names them. Run it after a pin has changed, with PyPI's simple index:

    python requirements/hashes.py https://HOST/simple/
"""

import json
import os
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

FILES = ("lock", "nodeps", "dev", "torch", "cuda13")
PYTHONS = ("cp311", "cp312")
LINUX = re.compile(r"any|(many)?linux.*_(x86_64|aarch64)")


def fits(name: str) -> bool:
    """Whether a wheel runs on Linux (x86-64 or Arm) under one of PYTHONS."""
    for tag in parse_wheel_filename(name)[3]:
        stable = tag.abi == "abi3" and int(tag.interpreter.removeprefix("cp3")) <= 12
        python = tag.interpreter in PYTHONS or tag.interpreter.startswith("py3") or stable
        if python and LINUX.fullmatch(tag.platform):
            return True
    return False


def block(index: str, pin: str) -> str:
    """The lines of one package: its wheels, or its source where it has none."""
    name, version = pin.split("==")
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers=accept), timeout=60
    ) as page:
        files = {file["filename"]: file["hashes"]["sha256"] for file in json.load(page)["files"]}
    wheels, sources = [], []
    for file, digest in files.items():
        try:
            if file.endswith(".whl"):
                if str(parse_wheel_filename(file)[1]) == version and fits(file):
                    wheels.append(digest)
            elif file.endswith(".tar.gz") and str(parse_sdist_filename(file)[1]) == version:
                sources.append(digest)
        except (InvalidWheelFilename, ValueError):
            continue
    if not (found := wheels or sources):
        sys.exit(f"{pin}: {index} has no file of it for Linux and Python 3.11 or 3.12")
    return " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in sorted(found))])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(__file__).parent
    with ThreadPoolExecutor(16) as pool:
        for name in FILES:
            text = (folder / f"{name}.txt").read_text()
            pins = [line for line in text.splitlines() if line and not line.startswith("#")]
            about = f"# {name}.txt with hashes; written by requirements/hashes.py"
            new = folder / f"{name}.hashes.new"
            new.write_text("\n".join([about, *pool.map(partial(block, sys.argv[1]), pins)]) + "\n")
            os.replace(new, folder / f"{name}.hashes")


if __name__ == "__main__":
    main()
