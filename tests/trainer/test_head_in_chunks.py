"""Log-probs, entropies and gradients in chunks of rows are those of all logits at once, and never are all
logits there."""

from pathlib import Path

import numpy as np
import pytest

from helpers.trainer import tiny
from helpers.trainer.cases import ROWS
from helpers.trainer.counts import trainer_counts
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.models import LOGITS_BYTES, head_in_chunks, known_models, trainer_bytes
from laminar_hpc.config.system_schema import TrainerConfig

FAMILIES = {
    "qwen2-untied-gqa7": tiny.FAMILIES["qwen2-untied-gqa7"],
    "qwen2-tied-gqa7": {**tiny.FAMILIES["qwen2-untied-gqa7"], "tie_word_embeddings": True},
}
CASES = {
    "tp1-float32": ("qwen2-untied-gqa7", 1, {}),
    "tp2-float32-tied": ("qwen2-tied-gqa7", 2, {"sampling__temperature": 0.7}),
    "tp2-bfloat16": ("qwen2-untied-gqa7", 2, {"model__dtype": "bfloat16", "sampling__temperature": 0.7}),
    "tp2-bfloat16-rounded-head": (
        "qwen2-untied-gqa7",
        2,
        {"model__dtype": "bfloat16", "model__float32_head": False},
    ),
}

FEW = ("tp2-float32-tied", "tp2-bfloat16")  # the others are slow tests


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FEW else pytest.mark.slow) for case in CASES]
)
def test_chunks_are_the_whole(case: str, ranks: Ranks, tmp_path: Path) -> None:
    """With real Megatron: values to 1e-5, gradients of every parameter, to the last bits of float32 and to
    roundings of bfloat16; logits of at most ROWS rows at a time, also in the backward pass."""
    family, tensor, settings = CASES[case]
    model = tiny.make_model(tmp_path, **FAMILIES[family])
    settings = {"trainer__tensor_parallel": tensor, "trainer__tokens_per_microbatch": 2048, **settings}
    results = ranks.run(tensor, "cases:in_chunks", model=str(model), settings=settings)
    close = 0.02 if "bfloat16" in case else 1e-5
    for result in results:
        whole, chunks = result["whole"], result["chunks"]
        assert chunks["rows"] == whole["largest"] > 10 * ROWS and chunks["largest"] == ROWS
        for name in ("logprobs", "entropies", "scored"):
            assert np.abs(chunks[name] - whole[name]).max() < 1e-5, name
        assert np.abs(whole["entropies"]).max() > 1
        for name, gradient in whole["gradients"].items():
            difference = np.linalg.norm(chunks["gradients"][name] - gradient)
            assert difference <= close * np.linalg.norm(gradient) + 1e-9, name
            assert np.linalg.norm(gradient) > 0


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_have_the_gradient_of_plain_softmax(tensor: int, temperature: float, ranks: Ranks) -> None:
    """To 1e-6 times the largest, beside the log-probs' gradient, of all logits and in chunks, at one rank and
    over a vocabulary split over two, a part of which is padding."""
    for found in ranks.run(tensor, "cases:entropy_gradients", temperature=temperature):
        largest = found.pop("largest")
        assert largest > 0.5
        assert {name for name, value in found.items() if value > 1e-6 * max(1.0, 4 * largest)} == set(), found


def test_long_responses_do_not_bound_the_micro_batch() -> None:
    """Promise: 32K tokens over a vocabulary of 152K take no more than 8K do, and less than a quarter of all
    logits; a few tokens are not cut up."""
    model = known_models()["Qwen2.5-7B"]
    columns, hidden = model["vocab_size"], model["hidden_size"]
    assert head_in_chunks(32768, columns, hidden, 2) and not head_in_chunks(2048, columns, hidden, 2)

    def estimate(tokens: int, vocabulary: int) -> int:
        trainer = TrainerConfig(tokens_per_microbatch=tokens, recompute_activations="full")
        return trainer_bytes({**model, "vocab_size": vocabulary}, 2, trainer)

    def of_head(tokens: int) -> int:
        embedding_and_head = 2 * hidden * columns * 18  # weight, gradient, optimizer
        return estimate(tokens, columns) - estimate(tokens, 0) - embedding_and_head

    assert of_head(32768) == pytest.approx(of_head(8192), rel=1e-6)
    assert of_head(32768) < 0.25 * 2 * 4 * 32768 * columns and of_head(32768) < 8 * LOGITS_BYTES


def test_bytes_moved_per_logit(world: None) -> None:
    """Promise: on a GPU a bfloat16 head moves at most six times the bytes of its float32 logits, forward and
    backward, all products included."""
    assert 5 < trainer_counts.logit_passes() <= 6
