"""Whole runs of model families other than the example's, on real parts: what engines serve is what the
trainer has, at every step."""

import shutil
from pathlib import Path

import pytest

from helpers.runs import Run, metrics, summary
from helpers.trainer.tiny import EXPERTS, FAMILIES, make_model
from laminar_hpc.config.directories import examples_directory

STEPS = 4
# random weights earn some
REWARD = "def score(*, prompt, response, row):\n    return response.count('1') / (1 + len(response))\n"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("family", ["qwen3-untied", "llama3-gqa8", "qwen3-yarn", "glm4", *EXPERTS])
def test_a_run_of_each_family(family, tmp_path, monkeypatch):
    """Random weights behind the example's tokenizer, trained, published and served: one policy each,
    log-probs to 1e-3 at every step."""
    example, model = Path(examples_directory("arithmetic/base")), tmp_path / "model"
    ids = {
        "vocab_size": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    make_model(model, 3, **{**(FAMILIES | EXPERTS)[family], **ids})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(example / name, model / name)
    (tmp_path / "ones.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run = Run(
        tmp_path / family,
        f"model.path={model}",
        f"steps={STEPS}",
        "reward.function=ones.score",
        "optimizer.lr=1e-3",
        "evaluation.files=[]",
        "rollout.engine_start_seconds=600",
    )
    assert run.finish(840) == 0, run.lines
    run.assert_gone()
    figures, mismatches = summary(run.run_dir), metrics(run.run_dir, "logprob_mismatch")
    assert figures["steps"] == STEPS and figures["max_versions_per_trajectory"] == 1
    assert (
        {g["step"] for g in mismatches} >= {0, STEPS}
        and figures["logprob_mismatch_mean"] < 1e-3
        and max(g["max"] for g in mismatches) < 1e-3
    )
    assert all(step["grad_norm"] > 1e-3 for step in metrics(run.run_dir, "step")), "nothing was trained"
