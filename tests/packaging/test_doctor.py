"""`laminar doctor` and the bridge that lets transformers import beside a CPU torch."""

import os
import re
import subprocess
import sys
import time

import pytest

from helpers.processes import children_seconds
from laminar_hpc.launch.doctor import machine, packages

TOPICS = (
    "python|compiler|torch|GPUs|megatron-core|triton|transformers|sglang|CUDA compiler|KV migration|apex|"
    "transformer-engine|left behind|cores|memory|/dev/shm|disk|sandbox|loopback|trust|Slurm|demo"
)


def test_every_line_says_how_it_stands_and_it_is_quick() -> None:
    """One line per topic, `ok|warn|FAIL  what: value  (cure)`, within 3 s, and of a processor
    within 3 s each time: it reads metadata and imports nothing heavy."""
    program = "import sys; from laminar_hpc.launch import cli; sys.exit(cli.run(['doctor']))"
    seconds = list[float]()
    while not seconds or (min(seconds) >= 3 and len(seconds) < 3):  # other tests may have the processors
        spent, start = children_seconds(), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
        )
        seconds.append(time.monotonic() - start)
        assert children_seconds() - spent < 3
    assert min(seconds) < 3
    lines = done.stdout.splitlines()
    assert [re.match(rf"(?:ok  |warn|FAIL)  ({TOPICS}): \S", line)[1] for line in lines] == TOPICS.split("|")
    assert done.returncode == int(any(line.startswith("FAIL") for line in lines))


def test_a_slurm_that_does_not_answer_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch may ask the network for its configuration, and so take longer than the doctor waits."""

    def silent(*words: object, **options: float) -> None:
        raise subprocess.TimeoutExpired("sbatch", options["timeout"])

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", silent)
    assert "it names no cluster" in machine.slurm().value


def test_a_missing_sglang_platform_is_a_failure_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU SGLang runs only through our platform plugin; another one that is forced by the environment
    is named."""
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    finding = packages.sglang(has_gpu=False)
    assert (finding.level, finding.cure) == ("FAIL", "unset SGLANG_PLATFORM")


def test_the_compiler_for_engines_on_gpus_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Promise: without nvcc, or with one of another release than torch's CUDA, an engine would die at its
    first start: the doctor says so first, with the cure."""
    assert packages.cuda_compiler(has_gpu=False).level == "ok"
    monkeypatch.setattr(packages.cuda_toolkit, "home", lambda: None)
    found = packages.cuda_compiler(has_gpu=True)
    assert found.level == "FAIL" and "make setup CUDA=13" in found.cure
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    (tmp_path / "bin/ninja").symlink_to(nvcc)
    monkeypatch.setattr(packages.cuda_toolkit, "home", lambda: tmp_path)
    monkeypatch.setattr(packages, "installed", lambda _: "13.0.96")
    assert "while torch brings CUDA 13.0.96" in packages.cuda_compiler(has_gpu=True).value
    monkeypatch.setattr(packages, "installed", lambda _: "12.9.79")
    assert packages.cuda_compiler(has_gpu=True).level == "ok"


def test_an_apex_that_is_not_nvidias_is_told_apart(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's package of that name has no optimizers."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").touch()
    assert packages.apex().level == "FAIL"
    (tmp_path / "apex/optimizers").mkdir()
    assert packages.apex().level == "ok"


@pytest.mark.slow
def test_transformers_imports_beside_a_cpu_torch() -> None:
    """torchvision's published wheel cannot load its compiled part here; after our declaration, made twice,
    all the rest imports."""
    program = (
        "import laminar_hpc.machine.compat.torchvision as bridge; bridge.declare_schemas();"
        "import torchvision; from transformers import AutoImageProcessor, Qwen2ForCausalLM"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
