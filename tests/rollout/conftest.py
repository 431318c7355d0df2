"""The pair of real engines that the tests of this folder share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "turns"))

from engines import Pair, start_pair
from laminar_hpc.weights.slots import SlotWriter


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = start_pair(tmp_path_factory.mktemp("pair"))
    yield pair
    pair.stop()


@pytest.fixture
def slots(pair: Pair, tmp_path: Path) -> Iterator[SlotWriter]:
    """Slots for weights of the pair's models."""
    writer = SlotWriter(str(tmp_path), "run", 3, pair.models[0])
    yield writer
    writer.close()
