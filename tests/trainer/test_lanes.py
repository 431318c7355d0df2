"""Any trainer layout through any number of lanes: each machine's slot has the canonical bytes, and as many leave the trainers, to 1%."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from ranks import Ranks

LARGE = {"vocab_size": 3000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}  # 3.4 MB
TRAINERS = {"tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 2), "tp2-pp2": (2, 2, 1), "tp2-dp2": (2, 1, 2)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


def check(ranks: Ranks, layout: str, lanes: int, folder: Path) -> dict:
    tensor, pipeline, data = TRAINERS[layout]
    model = tiny.make_model(folder / "model", 3, **LARGE)
    settings = {
        "trainer__tensor_parallel": tensor, "trainer__pipeline_parallel": pipeline, "trainer__data_parallel": data,
        "relay__chunk_megabytes": 1, "relay__lanes": lanes, "relay__publish_timeout_seconds": 30.0,
    }  # fmt: skip
    told = ranks.run(tensor * pipeline * data, "cases:published_in_lanes", model=str(model), settings=settings, folder=str(folder))[0]
    assert all(told["size"] <= left <= 1.01 * told["size"] for left in told["bytes"]), told
    assert sum(told["lanes"]) == told["size"] and max(told["lanes"]) <= 1.25 * told["size"] / lanes
    print(layout, lanes, told)
    return told


def test_two_lanes_of_two_tensor_parallel_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank sends one lane and gathers about half of it; the slots of both machines are committed when both lanes are there."""
    told = check(ranks, "tp2", 2, tmp_path)
    assert told["senders"] == [0, 1] and sum(told["gathered"]) < 0.51 * told["size"]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("layout", TRAINERS)
def test_any_trainer_layout_to_any_engine(layout: str, lanes: int, ranks: Ranks, tmp_path: Path) -> None:
    """Trainer layouts x lanes x engines of 1 and 2 ranks. Several lanes are spread over the ranks; what replicas hold is not gathered, and
    of pipeline stages only what a border in a stage leaves."""
    told = check(ranks, layout, lanes, tmp_path)
    tensor, pipeline, data = TRAINERS[layout]
    assert len(set(told["senders"])) == min(lanes, tensor * pipeline * data)
    if tensor == 1:
        assert sum(told["gathered"]) <= (0 if data > 1 else {1: 0.6, 2: 0.15, 4: 0.15}[lanes] * told["size"])
