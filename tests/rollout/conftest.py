"""The pair of real engines that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.engines.pair import Pair, start_pair
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
