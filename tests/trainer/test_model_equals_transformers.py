"""The Megatron policy computes what transformers computes, from the same directory, before and after
training, packed or not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.paths import EXAMPLES
from helpers.trainer import tiny
from helpers.trainer.cases import all_logits
from helpers.trainer.checkpointing import save_hf
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.microbatch import make_microbatch
from laminar_hpc.weights.probe import probe_sequences

SHIPPED = EXAMPLES / "arithmetic" / "base"
LENGTHS = (13, 40, 7, 4, 7, 29)


def sequences(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, tiny.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def logits_by_transformers(directory: Path, texts: list[list[int]]) -> torch.Tensor:
    model = tiny.transformers_model(directory)
    return torch.cat([model(torch.tensor([s])).logits[0, :-1] for s in texts])


def logits_by_megatron(policy: MegatronPolicy, texts: list[list[int]]) -> torch.Tensor:
    return all_logits(policy, texts, lambda output: output[0, :, : policy.shape.vocab].float().cpu())[0]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_equal_transformers_both_ways(
    tied: bool, tied_model: Path, untied_model: Path, tmp_path: Path, world: None
) -> None:
    """A Hugging Face directory loads straight into Megatron, is trained, and is written back as one; logits
    to 1e-4 in float32 each way."""
    directory = tied_model if tied else untied_model
    config = tiny.make_config(directory, optimizer__lr=1e-2)
    policy = MegatronPolicy(config)
    before = logits_by_megatron(policy, sequences())
    assert (before - logits_by_transformers(directory, sequences())).abs().max() < 1e-4

    Learner(config, policy).train(tiny.step_batch(tiny.make_batch(seed=1)), 0, lambda: None)
    save_hf(policy, tmp_path / "hf")
    after = logits_by_megatron(policy, sequences())
    assert (after - before).abs().max() > 1e-2, (
        "training has changed nothing, so the second comparison proves nothing"
    )
    assert (after - logits_by_transformers(tmp_path / "hf", sequences())).abs().max() < 1e-4
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads(
        (directory / "config.json").read_text()
    )
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_the_shipped_base_equals_transformers(tmp_path: Path, world: None) -> None:
    """The example's model, as the demo loads it; what is written back is the same bits, with the tokenizer
    beside them."""
    policy = MegatronPolicy(tiny.make_config(SHIPPED))
    texts = [[t % policy.shape.vocab for t in s] for s in sequences()]
    assert (logits_by_megatron(policy, texts) - logits_by_transformers(SHIPPED, texts)).abs().max() < 1e-4
    save_hf(policy, tmp_path / "hf")
    assert {f.name for f in (tmp_path / "hf").iterdir()} == {f.name for f in SHIPPED.iterdir()}
    mine, theirs = (load_file(d / "model.safetensors") for d in (tmp_path / "hf", SHIPPED))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu_is_close_to_float32(tied_model: Path, world: None) -> None:
    """On CUDA in half precision the attention is another kernel; its log-probs stay close to transformers' in
    float32."""
    policy = MegatronPolicy(tiny.make_config(tied_model, model__dtype="bfloat16"))
    difference = logits_by_megatron(policy, sequences()).log_softmax(-1) - logits_by_transformers(
        tied_model, sequences()
    ).log_softmax(-1)
    assert difference.abs().mean() < 0.02


def test_canonical_tensors_are_the_state_dict_of_transformers(untied_model: Path, world: None) -> None:
    """Names, order, shapes and bits; and the metadata announces just these."""
    policy = MegatronPolicy(tiny.make_config(untied_model))
    expected = tiny.transformers_model(untied_model).state_dict()
    tensors = {name: t.cpu() for name, t in policy.canonical_tensors()}
    assert list(tensors) == list(expected)
    assert all(
        torch.equal(tensors[name], expected[name]) and tensors[name].is_contiguous() for name in expected
    )
    assert policy.canonical_metadata() == [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]


def test_probe_logprobs_equal_transformers(tied_model: Path, world: None) -> None:
    """4 x 31 log-probs of the fixed probe, at temperature 1 whatever the sampling temperature is."""
    policy = MegatronPolicy(tiny.make_config(tied_model, sampling__temperature=0.5))
    texts = probe_sequences(tiny.VOCAB)
    assert [len(s) for s in texts] == [32] * 4 and texts == probe_sequences(tiny.VOCAB)
    logp = logits_by_transformers(tied_model, texts).log_softmax(-1)
    expected = logp.gather(1, torch.tensor([t for s in texts for t in s[1:]])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(policy.probe_logprobs()), expected, atol=1e-5)


def test_packed_equals_unpacked(tied_model: Path, world: None) -> None:
    """One pack of many sequences and each sequence alone: the same log-probs, entropies and gradients. If the
    pack were one long sequence, as in the negative control, they would not be."""
    policy = MegatronPolicy(tiny.make_config(tied_model))
    batch = tiny.make_batch(seed=2)
    advantages = [1.0 if i % 2 else -1.0 for i in range(len(batch))]

    def run(parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        seen: dict[int, torch.Tensor] = {}
        micro_batches = [
            make_microbatch(tiny.examples([batch[i] for i in p], [advantages[i] for i in p]), policy.device)
            for p in parts
        ]

        def loss(micro: object, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, ...]:
            seen[len(seen)] = torch.stack([logprobs.detach(), entropies], 1).cpu()
            return (logprobs * micro.tokens.advantages).sum(), micro.tokens.real.sum().int(), torch.zeros(())

        policy.accumulate(micro_batches, loss)
        return torch.cat(list(seen.values())), torch.cat(
            [p.main_grad.flatten().cpu() for p in policy.gpt.parameters()]
        )

    packed, packed_gradient = run([list(range(len(batch)))])
    alone, alone_gradient = run([[i] for i in range(len(batch))])
    assert (packed - alone).abs().max() < 2e-5
    assert (packed_gradient - alone_gradient).abs().max() < 2e-5 * alone_gradient.abs().max().clamp(min=1)

    first = LENGTHS[0]
    apart, joined = (
        logits_by_megatron(policy, sequences()),
        logits_by_megatron(policy, [[t for s in sequences() for t in s]]),
    )
    assert (joined[: first - 1] - apart[: first - 1]).abs().max() < 1e-4
    assert (joined[first : first + 3] - apart[first - 1 : first + 2]).abs().max() > 0.1


def test_a_directory_that_is_no_complete_model_is_refused(
    tied_model: Path, tmp_path: Path, world: None
) -> None:
    """A missing tensor must not be trained from zeros: the error names it, and what to check."""
    for file in tied_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tied_model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LaminarError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        MegatronPolicy(tiny.make_config(tmp_path))
