"""By which way weights cross a link: a pure choice of the sending end."""

import pytest

from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.weights.links.transport import End, choose

HERE, THERE = "one boot", "another boot"


@pytest.mark.parametrize(
    ("sender", "receiver", "chosen"),
    [
        (End(HERE, "GPU-a"), End(THERE, "GPU-b"), "nccl"),
        (End(HERE, "GPU-a"), End(HERE, "GPU-b"), "host"),
        (End(HERE, "GPU-a"), End(HERE, "GPU-a"), "host"),
        (End(HERE, "GPU-a"), End(THERE, ""), "host"),
        (End(HERE, ""), End(THERE, "GPU-b"), "host"),
        (End(HERE, ""), End(THERE, ""), "host"),
    ],
)
def test_auto(sender: End, receiver: End, chosen: str) -> None:
    """NCCL between GPUs of different machines, host memory everywhere else."""
    assert choose("auto", sender, receiver, "relay 1") == chosen


def test_what_is_asked_for() -> None:
    """host always can be; nccl between any two GPUs, and else is refused in one line that says what to do."""
    assert choose("host", End(HERE, "GPU-a"), End(THERE, "GPU-b"), "relay 1") == "host"
    assert choose("nccl", End(HERE, "GPU-a"), End(HERE, "GPU-b"), "relay 1") == "nccl"
    for sender, receiver, text in (
        (End(HERE, "GPU-a"), End(HERE, "GPU-a"), "relay 1 use one GPU"),
        (End(HERE, "GPU-a"), End(THERE, ""), "relay 1 has no GPU"),
        (End(HERE, ""), End(THERE, "GPU-b"), "this process has no GPU"),
    ):
        with pytest.raises(PermanentFailure, match=f"relay.transport=nccl: .*{text}.*auto"):
            choose("nccl", sender, receiver, "relay 1")
