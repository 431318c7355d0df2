"""`laminar doctor` and the bridge that lets transformers import beside a CPU torch."""

import os
import re
import subprocess
import sys
import time

import pytest

from laminar_hpc import doctor

TOPICS = (
    "python|compiler|torch|GPUs|megatron-core|triton|transformers|sglang|KV migration|apex|"
    "transformer-engine|left behind|cores|memory|/dev/shm|disk|loopback|Slurm|demo"
)


def test_every_line_says_how_it_stands_and_it_is_quick() -> None:
    """One line per topic, `ok|warn|FAIL  what: value  (cure)`, within 3 s: it reads metadata and imports
    nothing heavy."""
    start = time.monotonic()
    program = "import sys; from laminar_hpc.doctor import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert time.monotonic() - start < 3
    lines = done.stdout.splitlines()
    assert [re.match(rf"(?:ok  |warn|FAIL)  ({TOPICS}): \S", line)[1] for line in lines] == TOPICS.split("|")
    assert done.returncode == int(any(line.startswith("FAIL") for line in lines))


def test_a_missing_sglang_platform_is_a_failure_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU SGLang runs only through our platform plugin; another one that is forced by the environment
    is named."""
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    finding = doctor.sglang(has_gpu=False)
    assert (finding.level, finding.cure) == ("FAIL", "unset SGLANG_PLATFORM")


def test_an_apex_that_is_not_nvidias_is_told_apart(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's package of that name has no optimizers."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").touch()
    assert doctor.apex().level == "FAIL"
    (tmp_path / "apex/optimizers").mkdir()
    assert doctor.apex().level == "ok"


def test_transformers_imports_beside_a_cpu_torch() -> None:
    """torchvision's published wheel cannot load its compiled part here; after our declaration, made twice,
    all the rest imports."""
    program = (
        "import laminar_hpc.compat.torchvision as bridge; bridge.declare_schemas();"
        "import torchvision; from transformers import AutoImageProcessor, Qwen2ForCausalLM"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
