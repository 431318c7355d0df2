"""What a batch's rewards come to, function by function."""

from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.policies.metrics import reward_means


def trajectory(**parts: float) -> Trajectory:
    return Trajectory(0, 0, 0, 0, 0, 0, 1, 1, 1, "stop", 0.0, 1.0, reward_parts=parts)


def test_means_are_over_those_that_have_one():
    """A function that failed, or does not apply, takes no part in its own mean; one without any reward has
    none."""
    batch = [trajectory(right=1.0, length=-2.0, accuracy=1.0), trajectory(right=0.0), trajectory()]
    assert reward_means(batch, ["right", "length", "judge"]) == {
        "reward_mean/right": 0.5,
        "reward_mean/length": -2.0,
    }
