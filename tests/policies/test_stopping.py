"""How long an orderly stop may take follows from the steps and checkpoints before it."""

import pytest

from laminar_hpc.policies.stopping import GOODBYE_SECONDS, SAFETY, stop_limit, stop_seconds


def test_the_longest_step_and_checkpoint_count() -> None:
    """Promise: what is slow at any scale has the time that it needs: no constant for all sizes."""
    assert stop_seconds([], []) == GOODBYE_SECONDS
    assert stop_seconds([10.0, 40.0, 20.0], [100.0, 300.0]) == SAFETY * 340 + GOODBYE_SECONDS
    assert stop_seconds([900.0, *[10.0] * 20], []) == SAFETY * 10 + GOODBYE_SECONDS  # long ago


@pytest.mark.parametrize(
    ("steps", "saves", "limit"),
    [
        ([1.0], [1.0], 126.0),  # twice what is expected
        ([], [0.1], 120.3),
        ([0.1], [], 300.0),  # no checkpoint yet: nobody knows
        ([600.0], [200.0], 2520.0),
    ],
)
def test_the_limit_of_a_stop(steps: list[float], saves: list[float], limit: float) -> None:
    """Promise: a stop fails only after twice what earlier ones took, and not before the configured
    minimum."""
    assert stop_limit(steps, saves, at_least=60.0, unmeasured=300.0) == pytest.approx(limit)
