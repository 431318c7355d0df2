"""A low-rank adapter trains as PEFT and torch train it, at every layout, and is kept as PEFT keeps it."""

from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from test_layouts import LAYOUTS, settings_of, texts, transformers_logits, whole_logits, world_of
from torch.distributed.checkpoint import FileSystemReader

from helpers.trainer import tiny
from helpers.trainer.adapters import adapter_layout
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.weights.hf import read_shape

STEPS, RANK, ALPHA = 20, 4, 12.0
FOUR_LAYERS = {**tiny.FAMILIES["qwen2-tied"], "num_hidden_layers": 4}
MODULES = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}
MODULES["all"] = MODULES["attention"] + MODULES["mlp"]
MORE = {  # layouts beside those of test_layouts.py: over a base of theirs
    "virtual": ("pp2", {"trainer__virtual_stages": 2}),
    "cp2": ("tp1", {"trainer__context_parallel": 2}),
    "tp2-cp2": ("tp2", {"trainer__context_parallel": 2}),
    "tp2-selective": ("tp2", {"trainer__recompute_activations": "selective"}),
    "tp2-full": ("tp2-distributed", {"trainer__recompute_activations": "full"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapted")
    shapes = {**tiny.FAMILIES, "four-layers": FOUR_LAYERS}
    return {
        name: tiny.make_model(root / name, seed, **shape) for seed, (name, shape) in enumerate(shapes.items())
    }


def adapted(model: Path, targets: str) -> peft.PeftModel:
    """By PEFT, with values that make every tensor matter from the first step on."""
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=MODULES[targets], task_type="CAUSAL_LM"
    )
    torch.manual_seed(5)
    found = peft.get_peft_model(tiny.transformers_model(model), settings)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return found


@pytest.fixture(scope="module")
def reference(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """family, targets -> PEFT's directory of the adapter before, losses, norms, logits before and after, the
    adapter after."""

    @cache
    def of(family: str, targets: str) -> tuple:
        model, folder = adapted(models[family], targets), tmp_path_factory.mktemp("peft")
        model.save_pretrained(folder)
        before = transformers_logits(model)
        config = tiny.make_config(models[family], **settings_of("tp1"))
        losses, norms, model = tiny.reference_training(model, config, STEPS)
        return (
            folder,
            losses,
            norms,
            before,
            transformers_logits(model),
            peft.get_peft_model_state_dict(model),
        )

    return of


def lora_settings(layout: str, targets: str, path: Path | str = "") -> tuple[int, dict[str, object]]:
    base, more = MORE.get(layout, (layout, {}))
    own = {"rank": RANK, "alpha": ALPHA, "targets": targets, "path": str(path)}
    context = more.get("trainer__context_parallel", 1)
    return world_of(base) * context, settings_of(
        base, **more, **{f"model__lora__{k}": v for k, v in own.items()}
    )


def check_adapter(
    family: str, layout: str, targets: str, ranks: Ranks, models, reference, run_dir: Path
) -> None:
    folder, losses, norms, before, after, trained = reference(family, targets)
    world, settings = lora_settings(layout, targets, folder)
    results = ranks.run(
        world,
        "cases:train",
        model=str(models[family]),
        settings=settings,
        texts=texts(),
        run_dir=str(run_dir),
        steps=(0, STEPS),
    )
    for result in results:
        assert [m["loss"] for m in result["metrics"]] == pytest.approx(losses, abs=1e-5)
        assert [m["grad_norm"] for m in result["metrics"]] == pytest.approx(norms, rel=1e-5, abs=1e-5)
        assert all(result[key] == results[0][key] for key in ("metrics", "hash", "mismatches"))
    if "trainer__context_parallel" not in settings:
        assert (whole_logits(results, "before") - before).abs().max() < 1e-4
        assert (whole_logits(results, "after") - after).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2
    hf = checkpoint_path(run_dir, STEPS) / "hf"
    written = load_file(hf / "adapter_model.safetensors")
    assert {name: t.shape for name, t in written.items()} == {name: t.shape for name, t in trained.items()}
    assert max((written[n] - trained[n]).abs().max().item() for n in written) < 1e-5
    loaded = peft.PeftModel.from_pretrained(tiny.transformers_model(models[family]), hf)
    assert (transformers_logits(loaded) - after).abs().max() < 1e-4
    lora = LoraConfig(rank=RANK, targets=targets)
    names = adapter_layout(read_shape(models[family]), lora)
    assert results[-1]["metadata"] == names and results[0]["names"] == [name for name, _ in names]


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.slow), "virtual"])
def test_adapters_train_as_peft_does(layout: str, ranks: Ranks, models, reference, tmp_path: Path) -> None:
    """20 steps of GRPO with AdamW: losses, gradient norms and every tensor of the adapter to 1e-5, logits to
    1e-4, also of the directory that is written, as PEFT loads it."""
    check_adapter("four-layers", layout, "all", ranks, models, reference, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *MORE])
def test_every_layout_trains_an_adapter(layout, ranks, models, reference, tmp_path) -> None:
    """The test above at all layouts that the trainer has, with four layers for virtual stages."""
    check_adapter("four-layers", layout, "all", ranks, models, reference, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["attention", "mlp"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_trains_an_adapter(family, targets, ranks, models, reference, tmp_path) -> None:
    """The same with every model family."""
    check_adapter(family, "tp2", targets, ranks, models, reference, tmp_path)


def check_resume(before: str, after: str, ranks: Ranks, models, reference, run_dir: Path) -> None:
    folder, losses, norms, *_ = reference("four-layers", "all")
    arguments = {"model": str(models["four-layers"]), "texts": texts(), "run_dir": str(run_dir)}
    for layout, steps, resume in ((before, (0, 2), False), (after, (2, 4), True)):
        world, settings = lora_settings(layout, "all", folder)
        results = ranks.run(world, "cases:train", **arguments, settings=settings, steps=steps, resume=resume)
    assert [m["loss"] for m in results[0]["metrics"]] == pytest.approx(losses[2:4], abs=1e-5)
    assert [m["grad_norm"] for m in results[0]["metrics"]] == pytest.approx(norms[2:4], rel=1e-5, abs=1e-5)


def test_an_adapter_goes_on_at_another_layout(ranks, models, reference, tmp_path) -> None:
    """2 steps of tensor-parallel ranks, 2 of pipeline stages that share the optimizer's state by range: the
    losses and norms of one run. What a checkpoint holds of the optimizer is the adapter's alone."""
    check_resume("tp2-distributed", "pp2-distributed", ranks, models, reference, tmp_path)
    checkpoint = checkpoint_path(tmp_path, 2)
    files = {path.name for path in (checkpoint / "hf").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"}
    held = FileSystemReader(checkpoint / "megatron").read_metadata().state_dict_metadata
    moments = {
        name: of.size.numel() for name, of in held.items() if name.startswith("optimizer.state.exp_avg")
    }
    values = sum(t.numel() for t in load_file(checkpoint / "hf" / "adapter_model.safetensors").values())
    assert all(".adapter." in name for name in moments) and sum(moments.values()) == 2 * values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2", "dp2"), ("dp2", "virtual"), ("virtual", "cp2"), ("tp2-dp2-distributed", "tp1-distributed")],
)
def test_any_layout_goes_on_with_an_adapter(before, after, ranks, models, reference, tmp_path) -> None:
    """More of the test above."""
    check_resume(before, after, ranks, models, reference, tmp_path)
