"""Two devices that work behind the host's back, and the link between them."""

from collections.abc import Iterator

import pytest

from helpers.links.fake_device import FakeDevice, linked
from laminar_hpc.weights.links.links import Link


@pytest.fixture
def devices() -> tuple[FakeDevice, FakeDevice]:
    return FakeDevice("GPU-one"), FakeDevice("GPU-two")


@pytest.fixture
def device_link(devices: tuple[FakeDevice, FakeDevice]) -> Iterator[tuple[Link, Link]]:
    ends = linked(*devices)
    yield ends
    for end in ends:
        end.close()
