"""What a low-rank adapter changes of the trainer, and what it leaves alone."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file

from helpers.trainer import tiny
from helpers.trainer.adapters import adapter_layout
from helpers.trainer.checkpointing import Trainer
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import dump_config
from laminar_hpc.report.export.merged import export_merged
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.trainer.megatron.adam import named_state
from laminar_hpc.trainer.megatron.adapters import is_adapter
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.weights.adapters import adapter_config

LORA = {"model__lora__rank": 4, "model__lora__alpha": 12.0}
TEXTS = [[1, 5, 2, 8, 3], [4, 4, 1, 9, 7, 6, 2]]


def values(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in policy.canonical_tensors()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_changes_nothing_and_the_model_stays(dtype, tied_model: Path, world: None) -> None:
    """Publication 0 is the model, bit for bit. After a step each tensor of the adapter is another one, and of
    the model none; gradients, and the optimizer's state, are there for the adapter alone."""
    plain = MegatronPolicy(tiny.make_config(tied_model, model__dtype=dtype))
    trainer = Trainer(tied_model, Path("unused"), model__dtype=dtype, **LORA)
    policy = trainer.policy
    assert torch.equal(policy.logprobs(TEXTS), plain.logprobs(TEXTS))
    before, model = (
        values(policy),
        {n: p.clone() for n, p in policy.gpt.named_parameters() if not is_adapter(n)},
    )
    trainer.train(0, 2)
    assert (policy.logprobs(TEXTS) - plain.logprobs(TEXTS)).abs().max() > 1e-3
    now = dict(policy.gpt.named_parameters())
    assert all(torch.equal(now[name], p) and not now[name].requires_grad for name, p in model.items())
    assert all(not torch.equal(t, before[name]) for name, t in values(policy).items())
    assert {n for n, p in now.items() if hasattr(p, "main_grad")} == now.keys() - model.keys()
    layout = adapter_layout(policy.shape, policy.config.model.lora)
    size = sum(rows * columns for _, (rows, columns) in layout)
    assert sum(t.numel() for n, t in named_state(policy.optimizer) if n.endswith("exp_avg")) == size
    assert [(n, s) for n, s, _ in policy.canonical_metadata()] == layout
    assert {kind for *_, kind in policy.canonical_metadata()} == {getattr(torch, dtype)}


def test_a_new_adapter_is_the_same_at_every_layout(ranks: Ranks, untied_model: Path) -> None:
    """Its values follow from the seed and its tensors' names: A has the spread of PEFT's, B is 0."""
    found = []
    for layout in ({}, {"trainer__tensor_parallel": 2}, {"trainer__pipeline_parallel": 2}):
        world = 2 if layout else 1
        result = ranks.run(
            world, "cases:steps", model=str(untied_model), settings={**layout, **LORA}, count=0
        )
        found.append(result[0]["before"])
    for name, value in found[0].items():
        assert all(np.array_equal(value, other[name]) for other in found[1:])
        bound = value.shape[1] ** -0.5
        if ".lora_A." in name:
            assert 0.8 * bound < np.abs(value).max() <= bound and abs(value.mean()) < bound / 4
        else:
            assert not value.any()


def test_the_reference_is_the_model_without_the_adapter(tied_model: Path, world: None) -> None:
    """algorithm.kl_coefficient needs no second copy of the model, and the adapter is back afterwards."""
    plain = MegatronPolicy(tiny.make_config(tied_model))
    trainer = Trainer(tied_model, Path("unused"), algorithm__kl_coefficient=0.1, **LORA)
    policy, reference = trainer.policy, trainer.learner._reference
    (metrics,) = trainer.train(0, 1)
    assert metrics["kl"] > 0
    adapted = policy.logprobs(TEXTS)
    with reference.in_place():
        assert torch.equal(policy.logprobs(TEXTS), plain.logprobs(TEXTS))
    assert torch.equal(policy.logprobs(TEXTS), adapted) and not torch.equal(adapted, plain.logprobs(TEXTS))
    held = sum(t.numel() for t in reference.tensors().values())
    assert held == sum(t.numel() for t in values(policy).values())


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_an_adapters_resume_is_bit_exact(
    distributed: bool, untied_model: Path, world: None, tmp_path
) -> None:
    """Four steps are two steps, a checkpoint, and two steps, of bfloat16 and with a reference that moves."""
    settings = {
        "model__dtype": "bfloat16",
        "trainer__distributed_optimizer": distributed,
        "algorithm__kl_coefficient": 0.1,
        "algorithm__reference_every": 1,
        **LORA,
    }
    whole = Trainer(untied_model, tmp_path / "whole", **settings)
    whole.train(0, 4)
    first = Trainer(untied_model, tmp_path / "parts", **settings)
    first.train(0, 2)
    first.checkpointer.save(2)
    second = Trainer(untied_model, tmp_path / "parts", **settings)
    second.checkpointer.load(2)
    second.train(2, 4)
    assert second.checkpointer.state_hash() == whole.checkpointer.state_hash()


@pytest.mark.parametrize("targets", ["all", "mlp"])
def test_recomputation_changes_no_gradient_of_an_adapter(targets, untied_model: Path, world: None) -> None:
    """Also where the first layer's input has no gradient, with which Megatron computes a layer twice."""
    found = {}
    for choice in ("none", "selective", "full"):
        trainer = Trainer(
            untied_model,
            Path("unused"),
            trainer__recompute_activations=choice,
            model__lora__targets=targets,
            **LORA,
        )
        trainer.train(0, 1)
        found[choice] = values(trainer.policy)
    for choice in ("selective", "full"):
        assert all(torch.allclose(t, found["none"][n], atol=1e-7) for n, t in found[choice].items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_weights_times_the_adapter(
    dtype, ranks: Ranks, untied_model: Path
) -> None:
    """While B is 0, its gradient is scale * dL/dW A^T, where dL/dW is that of a run that trains the weights:
    through frozen layers the same gradient comes, with biases, a residual stream and logits in float32, over
    two tensor-parallel ranks."""
    model, split = str(untied_model), {"trainer__tensor_parallel": 2, "model__dtype": dtype}
    whole = ranks.run(2, "cases:gradients", model=model, settings=split)
    adapted = ranks.run(2, "cases:gradients", model=model, settings={**split, **LORA})
    first = ranks.run(2, "cases:steps", model=model, settings={**split, **LORA}, count=0)[0]["before"]
    close = 1e-5 if dtype == "float32" else 0.02
    for layer in range(2):
        own, block = f"decoder.layers.{layer}.mlp", f"base_model.model.model.layers.{layer}.mlp"
        checked = []
        for of_weights, of_adapter in zip(whole, adapted, strict=True):
            assert all(map(is_adapter, of_adapter))
            halves = np.split(of_weights[f"{own}.linear_fc1.weight"], 2)
            for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                wanted = 3.0 * half @ first[f"{block}.{name}.lora_A.weight"].T
                checked.append((of_adapter[f"{own}.linear_fc1.adapter.{name}.lora_B"], wanted))
        down = np.concatenate([each[f"{own}.linear_fc2.weight"] for each in whole], 1)
        wanted = 3.0 * down @ first[f"{block}.down_proj.lora_A.weight"].T
        checked += [(each[f"{own}.linear_fc2.adapter.down_proj.lora_B"], wanted) for each in adapted]
        assert (
            all(np.linalg.norm(a - b) < close * np.linalg.norm(b) for a, b in checked) and len(checked) == 6
        )


def test_an_adapter_is_packed_as_it_is_kept(ranks: Ranks, untied_model: Path) -> None:
    """A publication's bytes and sums, put together from two tensor-parallel ranks in chunks of any size."""
    settings = {"trainer__tensor_parallel": 2, "model__dtype": "bfloat16", **LORA}
    found, _ = ranks.run(
        2, "cases:packed", model=str(untied_model), settings=settings, sizes=[4, 256, 1 << 20]
    )
    assert len(found["whole"]) > 1000
    for size, bucket in found["buckets"].items():
        assert np.array_equal(bucket, found["whole"]) and found["sums"][size] == found["of_tensors"]


def test_export_merges_the_adapter_into_the_model(world: None, tmp_path: Path) -> None:
    """Promise: `laminar export RUN_DIR --merged DIR` gives the weights that PEFT's own merge gives, in the
    files that the model has."""
    shape = {**tiny.FAMILIES["llama3-gqa8"], "tie_word_embeddings": False}
    model = tiny.make_model(tmp_path / "model", shard_size="40KB", **shape)
    trainer = Trainer(model, tmp_path / "run", **LORA)
    trainer.train(0, 2)
    trainer.checkpointer.save(2)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(trainer.config))
    export_merged(tmp_path / "run", tmp_path / "merged")
    adapter = checkpoint_path(tmp_path / "run", 2) / "hf"
    expected = peft.PeftModel.from_pretrained(tiny.transformers_model(model), adapter).merge_and_unload()
    merged = tiny.transformers_model(tmp_path / "merged").state_dict()
    base = tiny.transformers_model(model).state_dict()
    assert max((merged[n] - t).abs().max().item() for n, t in expected.state_dict().items()) < 1e-6
    assert sum(not torch.equal(merged[n], base[n]) for n in base) == 7 * trainer.policy.shape.layers
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {p.name for p in model.iterdir()}


def test_another_adapter_is_gone_on_from(world: None, tied_model: Path, tmp_path: Path) -> None:
    """model.lora.path: a run begins with the values that another has left in its checkpoint."""
    trainer = Trainer(tied_model, tmp_path / "first", **LORA)
    trainer.train(0, 1)
    trainer.checkpointer.save(1)
    folder = checkpoint_path(tmp_path / "first", 1) / "hf"
    second = MegatronPolicy(tiny.make_config(tied_model, model__lora__path=str(folder), **LORA))
    left = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(t, left[n]) for n, t in values(second).items())
    settings = peft.LoraConfig.from_pretrained(folder)
    assert (
        settings.base_model_name_or_path
        == adapter_config(trainer.config.model.lora, str(tied_model))["base_model_name_or_path"]
    )
    assert Learner(second.config, second).train(tiny.step_batch(tiny.make_batch(seed=1)), 0, lambda: None)


def test_what_cannot_be_merged_is_said_in_one_line(tmp_path: Path) -> None:
    """Each with its cure, and without a directory that looks like a model."""
    run, model, target = tmp_path / "run", tmp_path / "model", tmp_path / "merged"
    run.mkdir()
    config = tiny.make_config(model, **LORA)
    (run / "config.yaml").write_text(dump_config(config))

    def refused(text: str) -> None:
        with pytest.raises(LaminarError, match=text):
            export_merged(run, target)

    refused("has no checkpoint yet; wait for its first one")
    checkpoint = checkpoint_path(run, 3)
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    refused("trains the whole model: .*step_000003/hf is such a directory already")
    (checkpoint / "hf" / "adapter_config.json").write_text("{}")
    refused(f"the model of {run} is not at model.path={model}; bring it back")
    model.mkdir()
    (model / "config.json").write_text("{}")
    refused("step_000003 is damaged: state.json has no step")
    assert not target.exists() and [path.name for path in tmp_path.iterdir() if "merged" in path.name] == []
    target.mkdir()
    refused(f"--merged {target} exists; name another directory")
