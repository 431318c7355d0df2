"""Context parallelism: whatever the ranks that share a pack, its losses, gradients and weights are one
rank's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks
from laminar_hpc.store.checkpoints import checkpoint_path

STEPS = 3
# name -> context, tensor, pipeline, data parallel, distributed optimizer
LAYOUTS = {
    "one": (1, 1, 1, 1, False),
    "one-distributed": (1, 1, 1, 1, True),
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
    context, tensor, pipeline, data, distributed = LAYOUTS[layout]
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


def world_of(layout: str) -> int:
    return int(np.prod(LAYOUTS[layout][:4]))


def trained(layout: str, algorithm: str, ranks: Ranks, model: Path) -> list[dict]:
    settings = settings_of(layout, algorithm)
    return ranks.run(world_of(layout), "cases:steps", model=str(model), settings=settings, count=STEPS)


def check(family: str, layout: str, algorithm: str, ranks: Ranks, folder: Path) -> None:
    model = tiny.make_model(folder / family, 1, **tiny.FAMILIES[family])
    (one,) = trained("one", algorithm, ranks, model)
    found = trained(layout, algorithm, ranks, model)
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
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("cp")])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-untied", "llama3-gqa8"])
def test_every_layout_trains_as_one_rank(
    family: str, layout: str, algorithm: str, ranks: Ranks, tmp_path: Path
) -> None:
    """The whole matrix of the test above; four ranks that share two key-value heads have copies of them."""
    check(family, layout, algorithm, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("gemma3", "cp2-tp2"), ("glm4", "cp2-pp2")])
def test_a_share_of_a_pack_is_turned_by_its_own_places(
    family: str, layout: str, ranks: Ranks, tmp_path: Path
) -> None:
    """The same where layers have a window and RoPE of their own, and where RoPE turns neighbours."""
    check(family, layout, "grpo", ranks, tmp_path)


RESUMES = [("cp2-dp2-distributed", "one-distributed")]
MORE_RESUMES = [
    ("one-distributed", "cp2-tp2-pp2-distributed"),
    ("cp2", "cp2-pp2"),
    ("cp2-tp2", "cp4"),
    ("cp4", "one"),
]


def check_resume(before: str, after: str, ranks: Ranks, folder: Path) -> None:
    model = tiny.make_model(folder / "model", 1, num_hidden_layers=4)
    arguments = {"model": str(model), "texts": [[1, 2, 3, 4, 5, 6, 7, 8]], "run_dir": str(folder)}

    def run(layout: str, **more: object) -> list[dict]:
        return ranks.run(
            world_of(layout), "cases:train", **arguments, settings=settings_of(layout, "grpo"), **more
        )

    saved = run(before, steps=(0, 2))
    assert all(each["hash"] == saved[0]["hash"] for each in saved)
    resumed = run(after, steps=(2, STEPS), resume=True)
    (one,) = trained("one", "grpo", ranks, model)
    for each in resumed:
        assert each["metrics"][0] == pytest.approx(one["metrics"][2], rel=1e-5, abs=1e-6)
    written = tiny.transformers_model(checkpoint_path(folder, STEPS) / "hf").state_dict()
    for name, weight in one["weights"].items():
        assert (written[name] - torch.from_numpy(weight)).abs().max() < 1e-6, name


@pytest.mark.parametrize(("before", "after"), RESUMES)
def test_checkpoints_resume_at_other_layouts(before: str, after: str, ranks: Ranks, tmp_path: Path) -> None:
    """Promise: what ranks that share packs have saved goes on at any other layout, and the other way round;
    hf/ holds the weights of one rank."""
    check_resume(before, after, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), MORE_RESUMES)
def test_more_resumes_at_other_layouts(before: str, after: str, ranks: Ranks, tmp_path: Path) -> None:
    """More pairs of the test above."""
    check_resume(before, after, ranks, tmp_path)


def test_each_rank_keeps_half_of_a_pack(ranks: Ranks, tmp_path: Path) -> None:
    """Promise: two ranks that share a micro-batch keep at most 0.6 of one rank's elements each for its
    backward pass, and a micro-batch may be as long as their shares together."""
    model = tiny.make_model(tmp_path / "model", 1, num_hidden_layers=4)
    one, two = (
        max(ranks.run(n, "cases:elements_kept", model=str(model), settings=settings_of(layout, "grpo")))
        for n, layout in ((1, "one"), (2, "cp2"))
    )
    assert two < 0.6 * one, (two, one)
