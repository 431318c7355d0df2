"""What a group of NCCL is made with, and how the host waits for a device."""

import contextlib
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from laminar_hpc.weights.links import streams
from laminar_hpc.weights.links.streams import CudaStreams

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("before", [None, "3"])
def test_a_group_of_nccl_ends_no_process(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the environment in the constructor of each group (ProcessGroupNCCL.cpp): the watchdog of
    this one ends nothing, those of all others do as before, whichever thread makes them."""
    seen: list[str | None] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get(NAME))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    streams = CudaStreams(torch.device("cuda", 0))
    threads = [threading.Thread(target=streams.pair, args=(None, 0, 1.0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["0"] * 8 and os.environ.get(NAME) == before


def test_who_waits_for_a_device_leaves_the_interpreter_to_the_training() -> None:
    """Promise: a wait looks at the device a few times, not every 20 us for seconds, and sees the end within a
    twentieth of the time that it took."""
    looks = 0
    began = time.monotonic()

    def reached() -> bool:
        nonlocal looks
        looks += 1
        return time.monotonic() - began > 0.3

    streams.until(reached, 10.0, "it", lambda: False)
    assert looks < 300
    with pytest.raises(RuntimeError, match="it was not done within 0 s"):
        streams.until(lambda: False, 0.01, "it", lambda: False)
