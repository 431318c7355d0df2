"""trainer.virtual_stages: what is trained, saved and published is what it is without."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.trainer.step.packing import plan_microbatches

STEPS = 3
SHAPE = {**tiny.FAMILIES["qwen2-tied"], "num_hidden_layers": 4}
TEXTS = [[1, 5, 2, 8, 3], [4, 4, 1, 9, 7, 6, 2]]


def settings_of(pipeline: int, virtual: int, **more: object) -> dict[str, object]:
    return {
        "trainer__pipeline_parallel": pipeline,
        "trainer__virtual_stages": virtual,
        "optimizer__lr": 1e-3,
        "optimizer__weight_decay": 0.1,
        "trainer__tokens_per_microbatch": 128,
        "checkpoint__state_hash": True,
        **more,
    }


def written(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    files = (checkpoint_path(run_dir, step) / "hf").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_alike(one: list[dict], other: list[dict]) -> None:
    for left, right in zip(one[0]["metrics"], other[0]["metrics"], strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert left[key] == pytest.approx(right[key], rel=1e-6, abs=1e-6), key
    assert np.allclose(one[0]["probe"], other[0]["probe"], atol=1e-6)
    assert one[0]["names"] == other[0]["names"] and one[0]["metadata"] == other[0]["metadata"]


def check_virtual(ranks: Ranks, world: int, settings: dict, model: Path, folder: Path, layout: dict) -> None:
    """Three steps with virtual stages and without, then one more from the other's checkpoint: with virtual
    stages, and on one rank."""
    few = {**settings, "trainer__virtual_stages": 1}
    arguments = {"model": str(model), "texts": TEXTS, "steps": (0, STEPS)}
    with_chunks, without = folder / "chunks", folder / "whole"
    one = ranks.run(world, "cases:train", settings=settings, run_dir=str(with_chunks), **arguments)
    other = ranks.run(world, "cases:train", settings=few, run_dir=str(without), **arguments)
    check_alike(one, other)
    weights, expected = written(with_chunks, STEPS), written(without, STEPS)
    assert weights.keys() == expected.keys()
    assert all((weights[name] - expected[name]).abs().max() <= 1e-6 for name in expected)
    moved = max(
        (weights[name] - t).abs().max()
        for name, t in tiny.transformers_model(model).state_dict().items()
        if name in weights
    )
    assert moved > 1e-4
    later = {**arguments, "steps": (STEPS, STEPS + 1), "resume": True}
    onward = ranks.run(1, "cases:train", settings=layout, run_dir=str(with_chunks), **later)
    back = ranks.run(world, "cases:train", settings=settings, run_dir=str(without), **later)
    check_alike(onward, back)


def test_virtual_stages_train_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Promise: two stages of two chunks each, of a tied model: losses and weights after three steps are those
    of two plain stages to 1e-6; a checkpoint of either is resumed by the other, and by one rank."""
    model = tiny.make_model(tmp_path / "model", **SHAPE)
    settings = settings_of(2, 2)
    check_virtual(ranks, 2, settings, model, tmp_path, settings_of(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more"),
    [
        (4, {"trainer__data_parallel": 2, "trainer__distributed_optimizer": True}),
        (4, {"trainer__tensor_parallel": 2, "trainer__recompute_activations": "selective"}),
        (2, {"trainer__recompute_activations": "full", "model__dtype": "float32"}),
        (4, {"trainer__context_parallel": 2}),
        (4, {"trainer__data_parallel": 2, "trainer__expert_parallel": 2}),
    ],
)
def test_virtual_stages_at_other_layouts(world: int, more: dict, ranks: Ranks, tmp_path: Path) -> None:
    """The same with data, tensor, context and expert parallelism, the distributed optimizer and
    recomputation."""
    of_family = tiny.EXPERTS["qwen3-moe"] if "trainer__expert_parallel" in more else None
    shape = {**(of_family or tiny.FAMILIES["qwen3-untied"]), "num_hidden_layers": 4}
    model = tiny.make_model(tmp_path / "model", **shape)
    settings = settings_of(2, 2, **more)
    other = {"trainer__distributed_optimizer": more.get("trainer__distributed_optimizer", False)}
    check_virtual(ranks, world, settings, model, tmp_path, settings_of(1, 1, **other))
    arguments = {"model": str(model), "texts": TEXTS, "resume": True, "run_dir": str(tmp_path / "chunks")}
    ranks.run(world, "cases:train", settings=settings, steps=(STEPS, STEPS), **arguments)  # hash compared


def test_publication_is_in_the_models_order(ranks: Ranks, tmp_path: Path) -> None:
    """Promise: what two stages of two chunks publish is byte for byte the canonical layout of one rank."""
    model = str(tiny.make_model(tmp_path / "model", **SHAPE))
    found = {
        world: ranks.run(world, "cases:packed", model=model, settings=settings, sizes=[4096])[0]
        for world, settings in ((1, settings_of(1, 1)), (2, settings_of(2, 2)))
    }
    one, two = found[1], found[2]
    assert np.array_equal(one["buckets"][4096], two["buckets"][4096])
    assert np.array_equal(two["buckets"][4096], two["whole"]) and len(two["whole"]) > 10_000
    assert one["sums"] == two["sums"] and two["sums"][4096] == two["of_tensors"]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_microbatches_come_in_multiples(multiple: int) -> None:
    """Promise: every rank has as many micro-batches, a multiple of the stages, within the budget, each
    trajectory in one; where there are more than needed they are even."""
    lengths = [7 * i % 23 + 1 for i in range(41)]
    plan = plan_microbatches(lengths, 2, 60, multiple=multiple)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(41))
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    sizes = [[sum(lengths[i] for i in part) for part in rank] for rank in plan]
    assert all(size <= 60 for rank in sizes for size in rank)
    if multiple == 4:
        assert all(max(rank) - min(rank) <= max(lengths) for rank in sizes)
    assert plan_microbatches([5, 3], 1, 60, multiple=4) == [[[0], [1], [], []]]
