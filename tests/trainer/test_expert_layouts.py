"""Mixtures of experts at every trainer layout train as plain transformers and torch do, and their checkpoints
are complete models that go on at any other layout."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_layouts import check_layout, references, settings_of, texts, world_of

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks
from laminar_hpc.store.checkpoints import checkpoint_path

# name -> layout of test_layouts.py, expert parallel
LAYOUTS = {
    "one": ("tp1", 1),
    "one-distributed": ("tp1-distributed", 1),
    "tp2": ("tp2", 1),
    "tp2-ep2": ("tp2", 2),
    "tp2-ep2-distributed": ("tp2-distributed", 2),
    "pp2": ("pp2", 1),
    "ep2-dp2": ("dp2", 2),
    "ep2-dp2-distributed": ("dp2-distributed", 2),
    "pp2-ep2-dp2-distributed": ("pp2-dp2-distributed", 2),
    "tp2-ep2-dp2": ("tp2-dp2", 2),
    "tp2-ep4-dp2": ("tp2-dp2", 4),
    "tp2-ep2-dp2-distributed": ("tp2-dp2-distributed", 2),
}
# With trainer.context_parallel=2 beside.
SHARED = {"cp2-ep2": ("tp1", 2), "cp2-tp2-ep4": ("tp2", 4), "cp2-ep2-distributed": ("tp1-distributed", 2)}
FEW = [("qwen3-moe", "tp2-ep2-distributed")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny.make_model(root / name, seed, **shape)
        for seed, (name, shape) in enumerate(tiny.EXPERTS.items())
    }


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Callable[[str], tuple]:
    return references(models)


def check(family: str, layout: str, ranks: Ranks, models, reference, run_dir: Path) -> None:
    name, expert_parallel = LAYOUTS[layout]
    check_layout(family, name, ranks, models, reference, run_dir, trainer__expert_parallel=expert_parallel)


@pytest.mark.parametrize(("family", "layout"), FEW)
def test_experts_train_as_transformers(
    family: str, layout: str, ranks: Ranks, models, reference, tmp_path: Path
) -> None:
    """8 steps of GRPO: losses and gradient norms to 1e-5, logits to 1e-4 before and after, also of the
    directory that is written. Uneven packs go through all-to-all."""
    check(family, layout, ranks, models, reference, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.EXPERTS)
def test_every_mixture_at_every_layout(
    family: str, layout: str, ranks: Ranks, models, reference, tmp_path: Path
) -> None:
    """The whole matrix of the test above."""
    check(family, layout, ranks, models, reference, tmp_path)


def weights_after(
    layout: str, steps: tuple[int, int], ranks: Ranks, model: Path, run_dir: Path, **more
) -> dict:
    """By the run at this layout, from its checkpoint of the first of `steps` where that is not 0."""
    name, expert_parallel = {**LAYOUTS, **SHARED}[layout]
    ranks.run(
        world_of(name) * more.get("trainer__context_parallel", 1),
        "cases:train",
        model=str(model),
        settings=settings_of(name, trainer__expert_parallel=expert_parallel, **more),
        texts=texts(),
        run_dir=str(run_dir),
        steps=steps,
        resume=steps[0] > 0,
    )
    files = (checkpoint_path(run_dir, steps[1]) / "hf").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


EXACT = [
    "ep2-dp2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in ("one", "ep2-dp2")),
]


@pytest.mark.parametrize("layout", EXACT)
def test_three_steps_give_the_weights_of_one_rank(layout: str, ranks: Ranks, models, tmp_path: Path) -> None:
    """Every weight of 3 steps to 1e-6: router, experts and all others."""
    expected = weights_after("one", (0, 3), ranks, models["qwen3-moe"], tmp_path / "one")
    found = weights_after(layout, (0, 3), ranks, models["qwen3-moe"], tmp_path / "more")
    before = tiny.published(models["qwen3-moe"])
    assert found.keys() == expected.keys() == before.keys()
    assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-6
    moved = [name for name in expected if (expected[name] - before[name]).abs().max() > 1e-4]
    assert any("mlp.gate." in name for name in moved) and sum(".experts." in name for name in moved) > 40


@pytest.mark.parametrize(
    "layout",
    [
        "ep2",
        pytest.param("tp2-ep4", marks=pytest.mark.slow),
        pytest.param("ep2-distributed", marks=pytest.mark.slow),
    ],
)
def test_experts_over_ranks_that_share_a_pack(layout: str, ranks: Ranks, models, tmp_path: Path) -> None:
    """Context-parallel ranks have a share of the experts each: every weight of 3 steps to 1e-6."""
    expected = weights_after("one", (0, 3), ranks, models["qwen3-moe"], tmp_path / "one")
    shared = {"trainer__context_parallel": 2}
    found = weights_after(f"cp2-{layout}", (0, 3), ranks, models["qwen3-moe"], tmp_path / "more", **shared)
    assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-6
    before = tiny.published(models["qwen3-moe"])
    assert max((expected[name] - before[name]).abs().max() for name in expected) > 1e-4


def test_recomputed_experts_give_the_same_weights(ranks: Ranks, models, tmp_path: Path) -> None:
    """Selective recomputation computes experts twice, and each token goes to the same ones."""
    expected = weights_after("one", (0, 3), ranks, models["qwen2-moe"], tmp_path / "one")
    selective = {"trainer__recompute_activations": "selective"}
    found = weights_after("one", (0, 3), ranks, models["qwen2-moe"], tmp_path / "more", **selective)
    assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-6


RESUMES = [("tp2-ep2", "one"), ("one-distributed", "ep2-dp2-distributed")]
MORE_RESUMES = [
    pair
    for pair in itertools.permutations(LAYOUTS, 2)
    if ("distributed" in pair[0]) == ("distributed" in pair[1]) and pair not in RESUMES
]


def check_resume(before: str, after: str, ranks: Ranks, model: Path, run_dir: Path, **more: object) -> None:
    expected = weights_after("one", (0, 4), ranks, model, run_dir / "one", **more)
    weights_after(before, (0, 2), ranks, model, run_dir / "run", **more)
    found = weights_after(after, (2, 4), ranks, model, run_dir / "run", **more)
    assert max((found[name].float() - expected[name].float()).abs().max() for name in expected) < 1e-6


@pytest.mark.parametrize(("before", "after"), RESUMES, ids=str)
def test_experts_resume_at_other_layouts(
    before: str, after: str, ranks: Ranks, models, tmp_path: Path
) -> None:
    """2 steps, a restart at another layout, 2 steps: the weights of 4 steps of one rank. Experts have an
    optimizer of their own on the one side and not on the other."""
    check_resume(before, after, ranks, models["qwen3-moe"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), MORE_RESUMES, ids=str)
def test_any_layout_of_experts_resumes_at_any_other(
    before: str, after: str, ranks: Ranks, models, tmp_path: Path
) -> None:
    """The whole matrix of the test above."""
    check_resume(before, after, ranks, models["qwen3-moe"], tmp_path)


# of about 2 MB, so that lanes and chunks have something to do
LARGER = {
    **tiny.EXPERTS["qwen3-moe"],
    "hidden_size": 64,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize(
    ("layout", "lanes", "delta"),
    [
        ("ep2-dp2", 2, "off"),
        pytest.param("ep2-dp2", 1, "auto", marks=pytest.mark.slow),
        pytest.param("tp2-ep2", 2, "auto", marks=pytest.mark.slow),
        pytest.param("tp2-ep4-dp2", 4, "off", marks=pytest.mark.slow),
        pytest.param("pp2-ep2-dp2-distributed", 4, "auto", marks=pytest.mark.slow),
    ],
)
def test_experts_are_published_in_lanes(
    layout: str, lanes: int, delta: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Slots have the bytes and sums of each step, and engines whose ranks divide whole experts load them. A
    rank's experts follow on each other, so that lanes end where ranks meet: few are gathered."""
    name, expert_parallel = LAYOUTS[layout]
    model = tiny.make_model(tmp_path / "model", 3, **LARGER)
    settings = settings_of(
        name,
        trainer__expert_parallel=expert_parallel,
        relay__chunk_megabytes=1,
        relay__lanes=lanes,
        relay__delta=delta,
        relay__publish_timeout_seconds=30.0,
    )
    told = ranks.run(
        world_of(name), "cases:published_in_lanes", model=str(model), settings=settings, folder=str(tmp_path)
    )[0]
    assert told["size"] > 2_000_000 and len(set(told["senders"])) >= min(lanes, 2)
    assert sum(told["gathered"]) < 0.6 * told["size"]
