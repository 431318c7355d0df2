"""What model.deterministic is refused with, a line each, and what it sets."""

import os
from collections.abc import Callable

import pytest

from helpers.refusals import refusal
from laminar_hpc.config.determinism import refuse_on_cpu, refuse_on_gpu, wrong_determinism
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang import command_line
from laminar_hpc.trainer.megatron.deterministic import become_deterministic, set_variables

DEMO = ["experiment=demo", "model.deterministic=true"]
WRONG = {
    "pipeline=partial": "take pipeline=sync or laminar",
    "pipeline=stream": "take pipeline=sync or one_step",
    "algorithm.first_samples=4": "leave it at null",
    "rollout.engine=emulated": "needs rollout.engine=sglang",
    "teacher.model=http://127.0.0.1:1": "name a directory",
    "rollout.engine_arguments.attention-backend=flashinfer": "needs one of triton, fa3, fa4",
    "rollout.engine_arguments.decode_attention_backend=flashinfer": "needs one of triton, fa3, fa4",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_depends_on_time_is_refused(word: str) -> None:
    """One line, with the cure; and without the key it is as it was."""
    (line,) = wrong_determinism(load_config([*DEMO, word]))
    assert "model.deterministic=true" in line and WRONG[word] in line
    assert not list(wrong_determinism(load_config([DEMO[0], word])))


def test_a_command_line_is_refused() -> None:
    """The rules are among those of every command."""
    (line,) = refusal("train", *DEMO, "pipeline=partial", "dry_run=true")
    assert line.startswith("model.deterministic=true does not go with pipeline.refresh=interrupt: ")


@pytest.mark.parametrize(
    ("refuse", "word", "cure"),
    [
        (refuse_on_cpu, "model.dtype=bfloat16", "needs model.dtype=float32, not bfloat16"),
        (refuse_on_cpu, "rollout.tensor_parallel=2", "needs rollout.tensor_parallel=1"),
        (refuse_on_gpu, "model.lora.rank=8", "set it to 0"),
    ],
)
def test_what_a_device_cannot_do_is_refused_by_its_ranks(
    refuse: Callable[[RunConfig], None], word: str, cure: str
) -> None:
    """Which device a rank has is known there only."""
    refuse(load_config(DEMO))
    with pytest.raises(LaminarError, match=cure):
        refuse(load_config([*DEMO, word]))


def test_the_engine_is_started_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """With SGLang's own mode, and attention that has it; without the key neither."""
    for gpu, backend in ((False, "torch_native"), (True, "triton")):
        monkeypatch.setattr(command_line, "has_cuda", lambda gpu=gpu: gpu)
        words = command_line.arguments(load_config(DEMO), tmp_path, "1", 0)
        assert "--enable-deterministic-inference" in words
        assert words[words.index("--attention-backend") + 1] == backend
        plain = command_line.arguments(load_config([DEMO[0]]), tmp_path, "1", 0)
        assert "--enable-deterministic-inference" not in plain and "torch_native" not in plain


def test_libraries_are_told_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stands where it is deterministic, and is refused where it is not."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO")
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in names})
    become_deterministic(load_config([DEMO[0]]))
    assert not set(names) & os.environ.keys()
    os.environ["NCCL_ALGO"] = "Tree"
    set_variables()
    assert [os.environ[name] for name in names] == [":4096:8", "0", "Tree"]
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "1"
    with pytest.raises(LaminarError, match="needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, not 1; unset it"):
        set_variables()
