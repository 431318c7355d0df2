"""Every model family at every trainer layout trains as plain transformers and torch do, and its checkpoints
are complete models."""

import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import first_stage_layers
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.trainer.canonical.plan import HeldSlice, plan

STEPS = 20
LENGTHS = (13, 40, 7, 4, 7, 29)
# name -> tensor, pipeline, data parallel, distributed optimizer
LAYOUTS = {
    "tp1": (1, 1, 1, False),
    "tp1-distributed": (1, 1, 1, True),
    "tp2": (2, 1, 1, False),
    "tp2-distributed": (2, 1, 1, True),
    "pp2": (1, 2, 1, False),
    "pp2-distributed": (1, 2, 1, True),
    "dp2": (1, 1, 2, False),
    "dp2-distributed": (1, 1, 2, True),
    "tp2-pp2": (2, 2, 1, False),
    "tp2-dp2": (2, 1, 2, False),
    "tp2-dp2-distributed": (2, 1, 2, True),
    "pp2-dp2-distributed": (1, 2, 2, True),
}
# Each family and each kind of layout once; all combinations are slow tests.
FEW = [("qwen2-untied-gqa7", "tp2"), ("qwen3-tied", "pp2"), ("llama3-gqa8", "dp2")]


def settings_of(layout: str, **more: object) -> dict[str, object]:
    tensor, pipeline, data, distributed = LAYOUTS[layout]
    return {
        "trainer__tensor_parallel": tensor,
        "trainer__pipeline_parallel": pipeline,
        "trainer__data_parallel": data,
        "trainer__distributed_optimizer": distributed,
        "optimizer__lr": 1e-3,
        "optimizer__weight_decay": 0.1,
        "sampling__temperature": 0.8,
        "trainer__tokens_per_microbatch": 128,
        "checkpoint__state_hash": True,
        **more,
    }


def world_of(layout: str) -> int:
    tensor, pipeline, data, _ = LAYOUTS[layout]
    return tensor * pipeline * data


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, tiny.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def whole_logits(results: list[dict], key: str) -> torch.Tensor:
    """Put together from the last stage's tensor-parallel ranks of the first replica."""
    parts = [(r["place"], r[key]) for r in results if r[key] is not None and r["place"][2] == 0]
    return torch.from_numpy(
        np.concatenate([part for _, part in sorted(parts, key=lambda p: p[0])], -1)[:, : tiny.VOCAB]
    )


@torch.no_grad()
def transformers_logits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(torch.tensor([t])).logits[0, :-1] for t in texts()])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family; Llama's in several files."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny.make_model(root / name, seed, shard_size="40KB" if "llama" in name else "5GB", **shape)
        for seed, (name, shape) in enumerate(tiny.FAMILIES.items())
    }


def references(models: dict[str, Path]) -> Callable[[str], tuple]:
    """family -> losses, norms, logits before and after, by transformers; computed once."""

    @cache
    def of(family: str) -> tuple:
        config = tiny.make_config(models[family], **settings_of("tp1"))
        losses, norms, trained = tiny.reference_training(models[family], config, STEPS)
        return (
            losses,
            norms,
            transformers_logits(tiny.transformers_model(models[family])),
            transformers_logits(trained),
        )

    return of


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Callable[[str], tuple]:
    return references(models)


def check_layout(
    family: str,
    layout: str,
    ranks: Ranks,
    models: dict[str, Path],
    reference,
    run_dir: Path,
    **more: object,
) -> list[dict]:
    arguments = {
        "model": str(models[family]),
        "settings": settings_of(layout, **more),
        "texts": texts(),
        "run_dir": str(run_dir),
    }
    results = ranks.run(world_of(layout), "cases:train", **arguments, steps=(0, STEPS))
    losses, norms, before, after = reference(family)
    for result in results:  # on every rank the numbers of the whole batch
        assert [m["loss"] for m in result["metrics"]] == pytest.approx(losses, abs=1e-5)
        assert [m["grad_norm"] for m in result["metrics"]] == pytest.approx(norms, rel=1e-5, abs=1e-5)
        assert all(result[key] == results[0][key] for key in ("metrics", "hash", "mismatches"))
    mismatches = list(results[0]["mismatches"].values())
    assert (
        all(mismatch > 0 and ahead == STEPS - 1 for mismatch, ahead in mismatches) and len(mismatches) == 16
    )
    assert (whole_logits(results, "before") - before).abs().max() < 1e-4
    assert (whole_logits(results, "after") - after).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2, (
        "training has changed nothing, so the comparison proves nothing"
    )

    hf = checkpoint_path(run_dir, STEPS) / "hf"
    written = tiny.transformers_model(hf)
    assert (transformers_logits(written) - whole_logits(results, "after")).abs().max() < 1e-4
    state = tiny.published(models[family])
    names = [n for n in state if not (n == "lm_head.weight" and written.config.tie_word_embeddings)]
    in_order = list if family in tiny.FAMILIES else sorted
    assert [in_order(r["names"]) for r in results] == [in_order(names), *[[]] * (len(results) - 1)]
    assert in_order(results[-1]["metadata"]) == in_order((n, tuple(state[n].shape)) for n in names)
    assert json.loads((hf / "config.json").read_text()) == json.loads(
        (models[family] / "config.json").read_text()
    )
    assert all(r["probe"] == results[0]["probe"] and len(r["probe"]) == 4 * 31 for r in results)
    return results


@pytest.mark.parametrize(("family", "layout"), FEW)
def test_layouts_train_as_transformers(
    family: str, layout: str, ranks: Ranks, models, reference, tmp_path: Path
) -> None:
    """20 steps of GRPO: losses and gradient norms to 1e-5, logits to 1e-4 before and after, also of the
    directory that is written."""
    check_layout(family, layout, ranks, models, reference, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_at_every_layout(
    family: str, layout: str, ranks: Ranks, models, reference, tmp_path: Path
) -> None:
    """The whole matrix of the test above."""
    check_layout(family, layout, ranks, models, reference, tmp_path)


RESUMES = [("pp2-distributed", "pp2-distributed"), ("pp2-distributed", "dp2-distributed"), ("tp2", "pp2")]
MORE_RESUMES = [
    pair
    for pair in itertools.permutations(LAYOUTS, 2)
    if LAYOUTS[pair[0]][3] == LAYOUTS[pair[1]][3] and pair not in RESUMES
]


def check_resume(before: str, after: str, ranks: Ranks, models, reference, run_dir: Path) -> None:
    arguments = {"model": str(models["qwen2-tied"]), "texts": texts(), "run_dir": str(run_dir)}
    ranks.run(
        world_of(before),
        "cases:train",
        **arguments,
        settings=settings_of(before),
        steps=(0, 2),
    )
    resumed = ranks.run(
        world_of(after),
        "cases:train",
        **arguments,
        settings=settings_of(after),
        steps=(2, 5),
        resume=True,
    )
    losses, norms, *_ = reference("qwen2-tied")
    assert [m["loss"] for m in resumed[0]["metrics"]] == pytest.approx(losses[2:5], abs=1e-5)
    assert [m["grad_norm"] for m in resumed[0]["metrics"]] == pytest.approx(norms[2:5], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("before", "after"), RESUMES, ids=str)
def test_checkpoints_resume_at_other_layouts(
    before: str, after: str, ranks: Ranks, models, reference, tmp_path: Path
) -> None:
    """2 steps, a restart, 3 steps: the losses and norms of one run, optimizer state included. At the layout
    of before, `load` compares the state's hash too: with a tied embedding in a bucket of its own, Megatron
    alone loses the end of the optimizer's state."""
    check_resume(before, after, ranks, models, reference, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), MORE_RESUMES, ids=str)
def test_any_layout_resumes_at_any_other(
    before: str, after: str, ranks: Ranks, models, reference, tmp_path: Path
) -> None:
    """The whole matrix of the test above."""
    check_resume(before, after, ranks, models, reference, tmp_path)


@pytest.mark.parametrize(("family", "layout"), [("llama3-gqa8", "tp2"), ("qwen2-tied", "pp2")])
def test_what_is_not_trained_is_written_bit_for_bit(
    family: str, layout: str, ranks: Ranks, models, tmp_path: Path
) -> None:
    """Loaded in parts and put together again, each tensor is what it was, also where each pipeline stage
    writes a file of its own."""
    arguments = {
        "model": str(models[family]),
        "settings": settings_of(layout),
        "texts": texts(),
        "run_dir": str(tmp_path),
    }
    ranks.run(world_of(layout), "cases:train", **arguments, steps=(0, 0))
    files = (checkpoint_path(tmp_path, 0) / "hf").glob("*.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = tiny.transformers_model(models[family]).state_dict()
    assert set(expected) - set(written) <= {"lm_head.weight"} and all(
        torch.equal(written[n], expected[n]) for n in written
    )


def test_recomputed_activations_give_the_same_gradients(ranks: Ranks, tmp_path: Path) -> None:
    """trainer.recompute_activations keeps less for the backward pass, at two tensor-parallel ranks too, and
    changes no gradient. The feed-forward part is wide, as those of real models are."""
    shape = {**tiny.FAMILIES["qwen3-untied"], "intermediate_size": 160}
    model, kept, gradients = str(tiny.make_model(tmp_path / "model", **shape)), {}, {}
    for choice in ("none", "selective", "full"):
        settings = settings_of("tp2", trainer__recompute_activations=choice)
        del settings["optimizer__lr"]
        gradients[choice] = ranks.run(2, "cases:gradients", model=model, settings=settings)
        kept[choice] = ranks.run(2, "cases:elements_kept", model=model, settings=settings)[0]
    for choice in ("selective", "full"):
        for one, other in zip(gradients["none"], gradients[choice], strict=True):
            assert all(np.abs(one[n] - other[n]).max() < 1e-7 for n in one)
            assert max(np.abs(g).max() for g in one.values()) > 1e-3
    assert kept["full"] < kept["selective"] < 0.9 * kept["none"] and kept["full"] < 0.6 * kept["none"]


def test_tensor_parallel_ranks_split_the_pack(ranks: Ranks, models) -> None:
    """Promise: of all that a layer keeps for the backward pass each of two ranks has half; packs of any
    number of tokens are split; a norm's gradient is that of all tokens, on both ranks."""
    model = str(models["qwen3-untied"])
    whole, halves = settings_of("tp1"), settings_of("tp2")
    kept = [
        ranks.run(n, "cases:elements_kept", model=model, settings=s) for n, s in ((1, whole), (2, halves))
    ]
    assert kept[1][0] == kept[1][1] < 0.6 * kept[0][0]
    del whole["optimizer__lr"], halves["optimizer__lr"]
    (one,) = ranks.run(1, "cases:gradients", model=model, settings=whole)
    both = ranks.run(2, "cases:gradients", model=model, settings=halves)
    norms = [name for name in one if "norm" in name]
    assert len(norms) > 4 and all(np.array_equal(both[0][n], both[1][n]) for n in norms)
    assert all(np.abs(both[0][n] - one[n]).max() < 1e-6 < 1e-4 < np.abs(one[n]).max() for n in norms)


def test_a_rank_that_does_not_come_is_named_in_time(ranks: Ranks, models) -> None:
    """Putting tensors together waits for another rank, but not without bound."""
    settings = settings_of("pp2", cluster__join_timeout_seconds=2.0)
    first, _ = ranks.run(2, "cases:gather_alone", model=str(models["qwen2-tied"]), settings=settings)
    assert re.match(r"trainer 0 waited at most 2 s for trainer 1 to pass model\.\S+ along", first)


def test_slices_of_the_ranks_are_planned_without_overlap() -> None:
    """Of replicas the first holder's is taken, an empty slice of padding is none, and a gap is an error."""

    def held(rank: int, start: int, length: int) -> HeldSlice:
        return HeldSlice("w", (5, 2), 0, start, length, rank)

    assert [
        (s.rank, s.start) for s in plan([held(0, 0, 3), held(1, 3, 2), held(2, 0, 3), held(3, 5, 0)])["w"]
    ] == [(0, 0), (1, 3)]
    with pytest.raises(LaminarError, match=r"slices of w do not make it up"):
        plan([held(0, 0, 3), held(1, 4, 1)])


@pytest.mark.parametrize(
    ("layers", "stages", "first"), [(4, 2, None), (3, 2, 2), (5, 4, 2), (30, 4, 9), (61, 8, 5), (2, 2, None)]
)
def test_layers_of_the_first_stage(layers: int, stages: int, first: int | None) -> None:
    """Every stage has a layer at least, and those behind the first have the same number."""
    assert first_stage_layers(layers, stages) == first
    assert (layers - (first or layers // stages)) % (stages - 1) == 0
