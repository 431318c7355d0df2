"""By which way weights cross a link: a pure choice of the sending end."""

import pytest

from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.weights.links.transport import LinkEndpoint, choose

HERE, THERE = "one boot", "another boot"


@pytest.mark.parametrize(
    ("sender", "receiver", "chosen"),
    [
        (LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(THERE, "GPU-b"), "nccl"),
        (LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(HERE, "GPU-b"), "host"),
        (LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(HERE, "GPU-a"), "host"),
        (LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(THERE, ""), "host"),
        (LinkEndpoint(HERE, ""), LinkEndpoint(THERE, "GPU-b"), "host"),
        (LinkEndpoint(HERE, ""), LinkEndpoint(THERE, ""), "host"),
    ],
)
def test_auto(sender: LinkEndpoint, receiver: LinkEndpoint, chosen: str) -> None:
    """NCCL between GPUs of different machines, host memory everywhere else."""
    assert choose("auto", sender, receiver, "relay 1") == chosen


def test_what_is_asked_for() -> None:
    """host always can be; nccl between any two GPUs, and else is refused in one line that says what to do."""
    assert choose("host", LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(THERE, "GPU-b"), "relay 1") == "host"
    assert choose("nccl", LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(HERE, "GPU-b"), "relay 1") == "nccl"
    for sender, receiver, text in (
        (LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(HERE, "GPU-a"), "relay 1 use one GPU"),
        (LinkEndpoint(HERE, "GPU-a"), LinkEndpoint(THERE, ""), "relay 1 has no GPU"),
        (LinkEndpoint(HERE, ""), LinkEndpoint(THERE, "GPU-b"), "this process has no GPU"),
    ):
        with pytest.raises(PermanentFailure, match=f"relay.transport=nccl: .*{text}.*auto"):
            choose("nccl", sender, receiver, "relay 1")
