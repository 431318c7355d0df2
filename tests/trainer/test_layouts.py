"""Every model family at every trainer layout trains as plain transformers and torch do, and its checkpoints are complete models."""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from ranks import Ranks

from laminar_hpc.weights.checkpoints import checkpoint_path

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
FEW = [("qwen2-untied-gqa7", "tp2"), ("qwen3-tied", "pp2"), ("llama3-gqa8", "dp2-distributed")]


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
    return torch.from_numpy(np.concatenate([part for _, part in sorted(parts, key=lambda p: p[0])], -1)[:, : tiny.VOCAB])


@torch.no_grad()
def transformers_logits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(torch.tensor([t])).logits[0, :-1] for t in texts()])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family; Llama's in several files."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny.make_model(root / name, seed, shard_size="40KB" if "llama" in name else "5GB", **shape)
        for seed, (name, shape) in enumerate(tiny.FAMILIES.items())
    }


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]):
    """family -> losses, norms, logits before and after, by transformers; computed once."""

    @cache
    def of(family: str) -> tuple:
        config = tiny.make_config(models[family], **settings_of("tp1"))
        losses, norms, trained = tiny.reference_training(models[family], config, STEPS)
        return losses, norms, transformers_logits(tiny.transformers_model(models[family])), transformers_logits(trained)

    return of


def check_layout(family: str, layout: str, ranks: Ranks, models: dict[str, Path], reference, run_dir: Path) -> list[dict]:
    arguments = {"model": str(models[family]), "settings": settings_of(layout), "texts": texts(), "run_dir": str(run_dir)}
    results = ranks.run(world_of(layout), "cases:train", **arguments, steps=(0, STEPS))
    losses, norms, before, after = reference(family)
    for result in results:  # on every rank the numbers of the whole batch
        assert [m["loss"] for m in result["metrics"]] == pytest.approx(losses, abs=1e-5)
        assert [m["grad_norm"] for m in result["metrics"]] == pytest.approx(norms, rel=1e-5, abs=1e-5)
        assert result["metrics"] == results[0]["metrics"] and result["hash"] == results[0]["hash"]
    assert (whole_logits(results, "before") - before).abs().max() < 1e-4
    assert (whole_logits(results, "after") - after).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2, "training has changed nothing, so the comparison proves nothing"

    hf = checkpoint_path(run_dir, STEPS) / "hf"
    written = tiny.transformers_model(hf)
    assert (transformers_logits(written) - whole_logits(results, "after")).abs().max() < 1e-4
    state = tiny.transformers_model(models[family]).state_dict()
    names = [n for n in state if not (n == "lm_head.weight" and written.config.tie_word_embeddings)]
    assert [r["names"] for r in results] == [names, *[[]] * (len(results) - 1)]
    assert results[-1]["metadata"] == [(n, tuple(state[n].shape)) for n in names]
    assert json.loads((hf / "config.json").read_text()) == json.loads((models[family] / "config.json").read_text())
    assert all(r["probe"] == results[0]["probe"] and len(r["probe"]) == 4 * 31 for r in results)
    return results


@pytest.mark.parametrize(("family", "layout"), FEW)
def test_layouts_train_as_transformers(family: str, layout: str, ranks: Ranks, models, reference, tmp_path: Path) -> None:
    """20 steps of GRPO: losses and gradient norms to 1e-5, logits to 1e-4 before and after, also of the directory that is written."""
    check_layout(family, layout, ranks, models, reference, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_at_every_layout(family: str, layout: str, ranks: Ranks, models, reference, tmp_path: Path) -> None:
    """The whole matrix of the test above."""
    check_layout(family, layout, ranks, models, reference, tmp_path)
