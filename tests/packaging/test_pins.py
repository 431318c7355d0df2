"""The requirement files against each other, against what src/ imports, and against the environment that the
tests run in."""

import ast
import importlib.metadata
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.paths import ROOT

REQUIREMENTS = ROOT / "requirements"
# Their metadata asks for the CUDA stack; what they import on the CPU is in lock.txt (nodeps.txt says so).
WIDER_THAN_THEIR_NEEDS = {"sglang", "xgrammar", "compressed-tensors", "torchvision"}


def pins(*files: str) -> dict[str, str]:
    """Package to version of all the named files; fails on a line that is no exact pin and on two versions of
    one package."""
    found: dict[str, str] = {}
    for file in files:
        for line in (REQUIREMENTS / f"{file}.txt").read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                name, _, version = line.partition("==")
                assert version and not set(version) & set(" <>=;*"), f"{file}.txt: not an exact pin: {line}"
                assert found.setdefault(canonicalize_name(name), version) == version, (
                    f"{file}.txt: {name} is pinned twice"
                )
    return found


@pytest.mark.parametrize("file", ["lock", "nodeps", "dev", "torch", "cuda13"])
def test_every_pin_has_its_hashes(file: str) -> None:
    """Each pin has the hashes of its files beside it; requirements/hashes.py writes them anew."""
    text = (REQUIREMENTS / f"{file}.hashes").read_text()
    blocks = [block.split() for block in text.replace("\\\n", " ").splitlines() if not block.startswith("#")]
    assert {
        canonicalize_name(name): version for name, _, version in (b[0].partition("==") for b in blocks)
    } == (pins(file))
    assert all(len(block) > 1 for block in blocks)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for block in blocks for word in block[1:])


@pytest.mark.parametrize("cuda", ["none", "cuda13"])
def test_one_version_per_package(cuda: str) -> None:
    """The CPU and the CUDA 13 environment share their pins, exactly."""
    assert pins("torch", "lock", "nodeps", "dev", *([] if cuda == "none" else [cuda]))["torch"]


def test_cuda12_replaces_only_sglang_and_what_it_pins() -> None:
    """CUDA 12 runs the same packages but for SGLang's last release that supports it."""
    shared, cuda12 = pins("torch", "lock", "nodeps", "dev"), pins("cuda12")
    assert {name for name in cuda12 if shared.get(name, cuda12[name]) != cuda12[name]} == {
        "sglang",
        "xgrammar",
    }
    assert cuda12["nvidia-nccl-cu12"]


@pytest.mark.parametrize("file", ["lock", "nodeps", "dev", "cuda12", "cuda13"])
def test_the_package_called_apex_on_pypi_is_never_installed(file: str) -> None:
    """It is an unrelated program whose import would mislead Megatron-core."""
    assert "apex" not in pins(file)


def test_the_environment_is_the_pinned_one() -> None:
    """`make test` runs on the versions of the files, so they are the tested ones. torch may carry a build tag
    (+cpu)."""
    different = {
        name: f"{installed} instead of {version}"
        for name, version in pins("torch", "lock", "nodeps", "dev").items()
        if (installed := importlib.metadata.version(name)).split("+")[0] != version
    }
    assert not different


def test_the_lock_is_complete() -> None:
    """All is installed with --no-deps, so every need of every package must itself be pinned, at a version
    that satisfies it."""
    missing = []
    known = pins("torch", "lock", "nodeps", "dev")
    for name in known.keys() - WIDER_THAN_THEIR_NEEDS:
        for line in importlib.metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            if canonicalize_name(need.name).startswith(
                ("nvidia-", "cuda-")
            ):  # those of a CUDA build of torch come with it
                continue
            version = known.get(canonicalize_name(need.name))
            if version is None or not need.specifier.contains(version, prereleases=True):
                missing.append(f"{name} needs {line}; pinned: {version}")
    assert not missing


def test_the_package_requires_what_it_imports() -> None:
    """Each foreign import of src/ is a requirement of laminar_hpc, or one of the engines that the extras
    bring; but for what runs under a user's own interpreter."""
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    owners = importlib.metadata.packages_distributions()
    of_extras, of_type_checkers = {"sglang", "triton", "flashinfer"}, {"_typeshed"}
    elsewhere = {"openai", "verifiers"}  # environments/verifiers/bridge.py
    others = of_extras | of_type_checkers | elsewhere | {"laminar_hpc"}
    foreign = imported - sys.stdlib_module_names - others
    needed = {canonicalize_name(owners[name][0]) for name in foreign}
    requirements = [
        line for line in importlib.metadata.requires("laminar_hpc") or [] if "extra ==" not in line
    ]
    stated = {canonicalize_name(Requirement(line).name) for line in requirements}
    assert needed <= stated
