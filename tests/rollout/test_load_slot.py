"""A slot's file before a GPU's copies: registered with CUDA as the system allows, and no error left behind.
No GPU is needed: CUDA's answers are a table."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from laminar_hpc.engine.sglang import server
from laminar_hpc.engine.sglang.plugin import load_slot

NOT_SUPPORTED = 801  # cudaErrorNotSupported


class Cudart:
    """Registers with the flags of `takes`; remembers the error of the last refusal until it is cleared."""

    def __init__(self, *takes: int) -> None:
        self.takes, self.registered, self.error = takes, {}, 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if flags in self.takes:
            self.registered[address] = size
            return 0
        self.error = NOT_SUPPORTED
        return NOT_SUPPORTED

    def cudaHostUnregister(self, address: int) -> int:
        if self.registered.pop(address, None) is None:
            self.error = NOT_SUPPORTED
            return NOT_SUPPORTED
        return 0

    def clear(self) -> None:
        self.error = 0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load_slot, "_mapped", {})
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 16)
    return path


def use(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(load_slot, "_clear_error", cudart.clear)
    return cudart


@pytest.mark.parametrize(("takes", "registered"), [((8, 0), 1), ((0,), 1), ((), 0)])
def test_a_slot_is_registered_as_the_system_allows(
    takes: tuple[int, ...],
    registered: int,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Promise: read-only, else as a mapping that could be written, else not, with a word; the bytes are there
    at once, and a refusal leaves no error for the next launch."""
    cudart = use(Cudart(*takes), monkeypatch)
    with caplog.at_level(logging.WARNING):
        data = load_slot.map_file(file, pinned=True)
    assert data.numpy().tobytes() == file.read_bytes() and cudart.error == 0
    assert len(cudart.registered) == registered and (data.data_ptr() in cudart.registered) == bool(registered)
    assert ["pageable memory" in line for line in caplog.messages] == [True] * (not registered)
    assert load_slot.map_file(file, pinned=True) is data


def test_a_slot_that_was_made_anew_is_registered_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the old registration goes first; where there was none, its refusal leaves no error."""
    cudart = use(Cudart(8), monkeypatch)
    for takes in ((8,), (), (8,)):
        cudart.takes = takes
        fresh = file.with_name("fresh")
        fresh.write_bytes(bytes(4096))
        fresh.rename(file)
        load_slot.map_file(file, pinned=True)
        assert cudart.error == 0 and len(cudart.registered) == len(takes)


def test_the_limit_of_a_load_grows_with_its_bytes() -> None:
    """Promise: 145 GB, registered by eight ranks in turn, are not given up after two minutes."""
    assert server.load_seconds(0) == server.CONTROL_SECONDS
    assert server.load_seconds(145 * 10**9) > 400


def test_an_engine_that_cannot_use_its_gpus_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: it does not run on the CPU in silence."""
    from laminar_hpc.engine.sglang.plugin import serve

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    serve.check_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    with pytest.raises(
        SystemExit, match=r"SGLang finds no GPU, though this engine has 0, 1: [^\n]*make setup"
    ):
        serve.check_gpus()
