"""What the publisher packs: every trainer layout's shards, chunk by chunk, with the sums that follow them."""

from pathlib import Path

import pytest

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks

# tensor, pipeline, data parallel, dtype
LAYOUTS = {
    "tp1-bfloat16": (1, 1, 1, "bfloat16"),
    "tp2": (2, 1, 1, "float32"),
    "tp2-bfloat16": (2, 1, 1, "bfloat16"),
    "pp2": (1, 2, 1, "float32"),
}

SIZES = [1 << 20, 1236]  # bytes of a chunk: all in one, and cut inside rows and query groups


@pytest.mark.parametrize("family", [pytest.param("qwen2-untied-gqa7", marks=pytest.mark.slow), "qwen3-tied"])
def test_bucket_holds_the_canonical_tensors(family: str, ranks: Ranks, tmp_path: Path) -> None:
    """Byte for byte the tensors that a checkpoint gets, one after the other; a tensor's sums are those of its
    bytes. In one chunk, and in chunks that begin inside rows and inside query groups."""
    model = tiny.make_model(tmp_path / family, 3, **tiny.FAMILIES[family])
    buckets = {}
    for name, (tensor, pipeline, data, dtype) in LAYOUTS.items():
        settings = {
            "trainer__tensor_parallel": tensor,
            "trainer__pipeline_parallel": pipeline,
            "trainer__data_parallel": data,
            "model__dtype": dtype,
        }
        result = ranks.run(
            tensor * pipeline * data,
            "cases:packed",
            model=str(model),
            settings=settings,
            sizes=SIZES,
        )[0]
        for size in SIZES:
            assert (result["buckets"][size] == result["whole"]).all(), (name, size)
            assert result["sums"][size] == result["of_tensors"], (name, size)
        buckets.setdefault(dtype, []).append(result["whole"])
    for same in buckets.values():
        assert all((bucket == same[0]).all() for bucket in same), (
            "the layout of the trainer shows in what it publishes"
        )
