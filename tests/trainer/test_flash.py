"""Another flash attention than torch's own is used only where it gives the same."""

import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention import (
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention._registry import _FLASH_ATTENTION_IMPLS

from laminar_hpc.trainer.megatron import flash

CPU = torch.device("cpu")


class Handle:
    def remove(self) -> None: ...


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Callable], None]]:
    """A machine with a GPU of capability 9.0 and both packages, and a way to say what each gives: the
    registry is torch's own, the attention plain arithmetic."""
    before, gives = dict(_FLASH_ATTENTION_IMPLS), {}

    def give(name: str, result: Callable[[], list[torch.Tensor]], register: Callable = Handle) -> None:
        gives[name] = result
        register_flash_attention_impl(name, register_fn=register)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash, "_installed", lambda module: True)
    monkeypatch.setattr(
        flash,
        "_attend",
        lambda *_: gives.get(current_flash_attention_impl(), lambda: [torch.ones(4)])(),
    )
    yield give
    restore_flash_attention_impl(_raise_warn=False)
    _FLASH_ATTENTION_IMPLS.update(before)


def test_the_first_that_gives_the_same_is_used(hopper) -> None:
    hopper("FA3", lambda: [torch.full((4,), 1.01)])
    hopper("FA4", lambda: [torch.ones(4)])
    assert flash.use_fastest_attention(CPU, (8, 2), 64) == current_flash_attention_impl() == "FA3"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: [torch.full((4,), 1.2)], "differs from FA2 by 0.2"),
        (lambda: [torch.full((4,), torch.nan)], "differs from FA2 by inf"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_one_that_is_wrong_or_fails_is_passed_over_with_a_word(hopper, wrong, said, caplog) -> None:
    """Promise: a broken optional package costs speed, not the run, and torch is as it was."""

    def lacks() -> Handle:
        raise RuntimeError("does not expose FA4 kernels")

    hopper("FA3", wrong)
    hopper("FA4", lambda: [torch.ones(4)], register=lacks)
    assert flash.use_fastest_attention(CPU, (8, 2), 64) == "FA2" and current_flash_attention_impl() is None
    assert f"FA3 is installed and not used: {said}" in caplog.text
    assert "FA4 is installed and not used: RuntimeError: does not expose FA4 kernels" in caplog.text


def test_what_is_not_installed_or_not_for_this_gpu_is_not_tried(monkeypatch) -> None:
    """Torch knows both names, here neither package nor GPU is there."""
    assert not flash._installed("flash_attn.cute")
    assert [list(flash.candidates(major)) for major in (8, 9, 10)] == [[], [], []]
    monkeypatch.setattr(flash, "_installed", lambda module: True)
    assert [list(flash.candidates(major)) for major in (8, 9, 10)] == [[], ["FA3", "FA4"], ["FA4"]]


def test_the_log_says_which_runs_and_fa4_keeps_its_kernels(hopper, monkeypatch, caplog) -> None:
    """Promise: the cache of FA4's compiled kernels is on before its package is imported, unless the user has
    said otherwise; torch's own attention is named in the log too."""
    key, seen = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", []
    for name in ("FA3", "FA4"):
        hopper(name, lambda: [torch.zeros(4)], lambda: seen.append(os.environ.get(key)) or Handle())
    monkeypatch.delenv(key, raising=False)
    with caplog.at_level(logging.INFO):
        assert flash.use_fastest_attention(CPU, (8, 2), 64) == "FA2"
    assert seen == ["1", "1"] and "attention by FA2, torch's own" in caplog.text
    monkeypatch.setenv(key, "0")
    flash.use_fastest_attention(CPU, (8, 2), 64)
    assert seen[2:] == ["0", "0"]
