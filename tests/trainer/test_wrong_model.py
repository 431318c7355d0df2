"""A config.json that is not that of the weights is refused by name; the entropy of a long batch needs no
second copy of its logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.trainer import tiny
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.weights.kernels import logprobs


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("intermediate_size", 64, "config.json says"), ("num_hidden_layers", 3, "layers.2")],
)
def test_a_config_of_another_model_is_refused(
    untied_model: Path, tmp_path: Path, world: None, key: str, value: int, text: str
) -> None:
    """Promise: the wrong architecture is an error in one line, never a model that silently trains on
    garbage."""
    shutil.copytree(untied_model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(LaminarError, match=text) as error:
        MegatronPolicy(tiny.make_config(tmp_path / "model"))
    assert "\n" not in str(error.value) and str(tmp_path / "model") in str(error.value)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_has_one_head(untied_model: Path, tmp_path: Path, world: None, same: bool) -> None:
    """Promise: a config.json that ties head and embedding beside a file with another head is refused; a copy
    of the embedding is none."""
    shutil.copytree(untied_model, tmp_path / "model")
    file, weights = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    tensors = load_file(weights)
    embedding = tensors["model.embed_tokens.weight"].clone()
    assert not torch.equal(tensors["lm_head.weight"], embedding)
    save_file(tensors | ({"lm_head.weight": embedding.bfloat16().float()} if same else {}), weights)
    if same:
        save_file(load_file(weights) | {"model.embed_tokens.weight": embedding.bfloat16()}, weights)
        MegatronPolicy(tiny.make_config(tmp_path / "model"))
        return
    with pytest.raises(LaminarError, match=r"lm_head.weight is not model.embed_tokens.weight.*ties them"):
        MegatronPolicy(tiny.make_config(tmp_path / "model"))


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes anew."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.storage, self.elements = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.storage:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_entropy_of_a_long_batch_takes_bounded_memory(world: None) -> None:
    """Promise: entropy over n rows of logits makes temporaries of 1,024 rows, however large n is."""
    logits = torch.randn(10_000, 64)
    with _Largest(logits) as seen:
        _, total, weighted, _ = logprobs.summary(logits, torch.zeros(len(logits), dtype=torch.long), 64, 1.0)
        found = total.log() - weighted / total
    assert seen.elements <= max(1024 * 64, 10_000)
    torch.testing.assert_close(found, torch.distributions.Categorical(logits=logits).entropy())
