"""Context parallelism: whatever the ranks that share a pack, its losses, gradients and weights are one
rank's."""

from pathlib import Path

import numpy as np
import pytest

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks

STEPS = 3
# name -> context, tensor, pipeline, data parallel, distributed optimizer
LAYOUTS = {
    "cp2": (2, 1, 1, 1, False),
    "cp2-distributed": (2, 1, 1, 1, True),
    "cp4": (4, 1, 1, 1, False),
    "cp2-tp2": (2, 2, 1, 1, False),
    "cp2-pp2": (2, 1, 2, 1, False),
    "cp2-dp2-distributed": (2, 1, 1, 2, True),
    "cp2-tp2-pp2-distributed": (2, 2, 2, 1, True),
}
ALGORITHMS: dict[str, dict[str, object]] = {
    "grpo": {},
    "gspo": {"algorithm__loss": "gspo", "algorithm__loss_aggregation": "sequences"},
    "kl": {
        "algorithm__kl_coefficient": 0.1,
        "algorithm__proximal": "recomputed",
        "algorithm__importance_weight_cap": 2.0,
        "algorithm__minibatches_per_step": 2,
        "algorithm__sequence_ratio_max": 1.05,
    },
}
FEW = [("qwen2-tied", "cp2-tp2", "kl"), ("qwen3-untied", "cp2-pp2", "gspo")]


def settings_of(layout: str, algorithm: str) -> dict[str, object]:
    context, tensor, pipeline, data, distributed = LAYOUTS.get(layout, (1, 1, 1, 1, False))
    return {
        "trainer__context_parallel": context,
        "trainer__tensor_parallel": tensor,
        "trainer__pipeline_parallel": pipeline,
        "trainer__data_parallel": data,
        "trainer__distributed_optimizer": distributed,
        "optimizer__lr": 1e-3,
        "optimizer__weight_decay": 0.1,
        "trainer__tokens_per_microbatch": 64 // context,
        **ALGORITHMS[algorithm],
    }


def trained(family: str, layout: str, algorithm: str, ranks: Ranks, model: Path) -> list[dict]:
    world = int(np.prod(LAYOUTS.get(layout, (1,))[:4]))
    return ranks.run(
        world, "cases:steps", model=str(model), settings=settings_of(layout, algorithm), count=STEPS
    )


def check(family: str, layout: str, algorithm: str, ranks: Ranks, folder: Path) -> None:
    model = tiny.make_model(folder / family, 1, **tiny.FAMILIES[family])
    (one,) = trained(family, "one", algorithm, ranks, model)
    found = trained(family, layout, algorithm, ranks, model)
    for of_rank in found:
        for ours, theirs in zip(of_rank["metrics"], one["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        assert of_rank["mismatches"].keys() == one["mismatches"].keys()
        for trajectory, (distance, updates) in one["mismatches"].items():
            assert of_rank["mismatches"][trajectory] == (pytest.approx(distance, abs=1e-6), updates)
        assert of_rank["logprobs"] == pytest.approx(one["logprobs"], abs=1e-5)
    for name, weight in one["weights"].items():
        assert np.abs(found[0]["weights"][name] - weight).max() < 1e-6, name
    assert any(np.abs(one["weights"][n] - one["before"][n]).max() > 1e-3 for n in one["before"])


@pytest.mark.parametrize(("family", "layout", "algorithm"), FEW)
def test_layouts_train_as_one_rank(
    family: str, layout: str, algorithm: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Promise: losses, all metrics and the weights after three steps are those of one rank to 1e-6, with
    log-probs of the reference and of the policy at the step's start on the way."""
    check(family, layout, algorithm, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-untied", "llama3-gqa8"])
def test_every_layout_trains_as_one_rank(
    family: str, layout: str, algorithm: str, ranks: Ranks, tmp_path: Path
) -> None:
    """The whole matrix of the test above; four ranks that share two key-value heads have copies of them."""
    check(family, layout, algorithm, ranks, tmp_path)
