"""A loss, an advantage and corrections of the user's own: what is wrong with one is said before a run begins,
in one line; the example that users copy works, and trains as the shipped loss does."""

import textwrap
from pathlib import Path

import pytest
import torch

from helpers.paths import ROOT
from helpers.trainer import tiny
from laminar_hpc.config.bounds import wrong_values
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.rules import broken_rules
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.algorithms.trial import try_own
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

HEAD = """
import torch
from laminar_hpc.trainer.algorithms.corrections import Correction
from laminar_hpc.trainer.algorithms.losses import TokenLosses
"""
LOSS = "def f(a, logprobs, old, tokens):\n"
ADVANTAGE = "def f(a, batch):\n"
CORRECTION = "def f(a, logprobs, tokens):\n"
WRONG = {
    "no TokenLosses": (
        "loss",
        LOSS + " return -logprobs",
        "it returned a Tensor; it must return a TokenLosses",
    ),
    "one number": (
        "loss",
        LOSS + " return TokenLosses(-logprobs.mean(), torch.zeros(13))",
        r"its loss has shape \[\]; one number per token is \[13\]",
    ),
    "detached": (
        "loss",
        LOSS + " return TokenLosses(-logprobs.detach() * tokens.advantages, torch.zeros_like(old))",
        "its loss has no gradient",
    ),
    "no gradient anywhere": (
        "loss",
        LOSS + " return TokenLosses(logprobs * 0, torch.zeros_like(old))",
        "the gradient of its loss by the log-probs is 0 everywhere",
    ),
    "not finite": (
        "loss",
        LOSS + " return TokenLosses(logprobs / (tokens.advantages * 0), torch.zeros_like(old))",
        "its loss is not finite",
    ),
    "of the micro-batch": (
        "loss",
        LOSS + " return TokenLosses((logprobs.mean() - logprobs) * tokens.advantages, 0 * old)",
        "its loss changes with the trajectories that share a micro-batch",
    ),
    "in place": (
        "loss",
        LOSS + " tokens.advantages.mul_(2)\n return TokenLosses(-logprobs, torch.zeros_like(old))",
        "it changes tokens.advantages",
    ),
    "an option that is not set": (
        "loss",
        LOSS + " return TokenLosses(-logprobs * a.options['beta'], torch.zeros_like(old))",
        "it raised KeyError: 'beta'",
    ),
    "nothing to average": (
        "loss",
        LOSS + " n = tokens.sequences\n return TokenLosses(-logprobs / (n and 1), torch.zeros_like(old))",
        "its loss of a micro-batch without trajectories is not finite",
    ),
    "per token": (
        "advantage",
        ADVANTAGE + " return torch.zeros(int(batch.tokens.sum()))",
        r"its advantage has shape .* one number per trajectory is \[24\]",
    ),
    "divided by 0": (
        "advantage",
        ADVANTAGE
        + " r = batch.rewards.view(len(batch.sizes), -1)\n"
        + " return ((r - r.mean(1, True)) / r.std(1, keepdim=True)).flatten()",
        "its advantage is not finite",
    ),
    "rewards in place": (
        "advantage",
        ADVANTAGE + " return batch.rewards.sub_(batch.rewards.mean())",
        "it changes the rewards",
    ),
    "no bool": (
        "corrections",
        CORRECTION + " return Correction(kept=torch.ones_like(logprobs))",
        "its kept is of torch.float32; it must be bool",
    ),
    "an empty one": ("corrections", CORRECTION + " return Correction()", "without weights and without kept"),
    "weights of the micro-batch": (
        "corrections",
        CORRECTION + " return Correction(torch.softmax(logprobs, 0))",
        "its weights or kept changes with the trajectories",
    ),
    "not there": ("loss", "g = 1", "has no 'f'"),
    "no function": ("loss", "f = 1", "is a int, not a function"),
}


def settings(key: str, path: str) -> AlgorithmConfig:
    return AlgorithmConfig(**{key: [path] if key == "corrections" else path})


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_function_is_one_line_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the setting's name and the function's."""
    key, code, words = WRONG[name]
    module = f"own_{list(WRONG).index(name)}"
    (tmp_path / f"{module}.py").write_text(HEAD + textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaminarError, match=words) as error:
        try_own(settings(key, f"{module}.f"))
    assert str(error.value).startswith(f"algorithm.{key}={module}.f") and "\n" not in str(error.value)


def test_names_with_a_dot_are_allowed_and_others_are_not() -> None:
    """A misspelt name is not taken for a module."""
    config = RunConfig()
    config.algorithm.loss = "my.loss"
    config.algorithm.corrections = ["my.correction"]
    assert not wrong_values(config)
    config.algorithm.corrections = ["my"]
    config.algorithm.loss = "clp"
    assert [line.partition(":")[0] for line in wrong_values(config)] == [
        "algorithm.loss=clp",
        "algorithm.corrections=my",
    ]


def test_options_that_nothing_reads_are_refused() -> None:
    """Unless a function of the user's own is there, which may read whatever it likes."""
    config = RunConfig()
    config.algorithm.options = {"negative_weight": 0.5}
    (line,) = [line for line in broken_rules(config, None) if "options" in line]
    assert line.startswith("algorithm.options.negative_weight: nothing here reads it")
    config.algorithm.loss = "my_objectives.loss"
    assert not [line for line in broken_rules(config, None) if "options" in line]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "objectives"))


def test_the_example_passes_its_trial(example: None) -> None:
    """All of it together."""
    try_own(
        AlgorithmConfig(
            loss="my_objectives.loss",
            advantage="my_objectives.advantage",
            corrections=["my_objectives.likely_tokens"],
        )
    )


def test_the_examples_loss_trains_as_the_shipped_one_bit_for_bit(
    example: None, tied_model: Path, world: None
) -> None:
    """With its default; with its option set the weights are others, so the option does something. The other
    two functions of the example change the update too."""
    own = "my_objectives"
    runs = {
        "shipped": {},
        "own": {"algorithm__loss": f"{own}.loss"},
        "option": {"algorithm__loss": f"{own}.loss", "algorithm__options": {"negative_weight": 0.5}},
        "advantage": {"algorithm__advantage": f"{own}.advantage"},
        "correction": {
            "algorithm__corrections": [f"{own}.likely_tokens"],
            "algorithm__options": {"smallest_probability": 0.02},
        },
    }
    weights, metrics = {}, {}
    for name, settings in runs.items():
        config = tiny.make_config(tied_model, algorithm__clip_high=0.05, algorithm__clip_low=0.05, **settings)
        policy = MegatronPolicy(config)
        metrics[name] = Learner(config, policy).train(
            tiny.step_batch(tiny.make_batch(seed=3)), 0, lambda: None
        )
        weights[name] = torch.cat([t.flatten() for _, t in policy.canonical_tensors()])
    assert torch.equal(weights["own"], weights["shipped"]) and metrics["own"] == metrics["shipped"]
    assert all(not torch.equal(weights[n], weights["shipped"]) for n in ("option", "advantage", "correction"))
    assert 0 < metrics["correction"]["left_out_fraction"] < 1
