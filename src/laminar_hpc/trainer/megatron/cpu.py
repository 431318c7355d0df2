"""Runs an unmodified megatron-core on a machine without CUDA; used by trainer/megatron/policy.py and
trainer/checkpoint.py around Megatron's calls.

`with cuda_as_cpu():` is a no-op where CUDA is, so the same code trains on GPUs. Elsewhere it turns three
things that would be errors into their CPU equivalent: a request for a "cuda" tensor gives a CPU tensor;
torch.cuda.current_device() and the like name the CPU or do nothing; and, for callers inside
megatron.core.optimizer only, Tensor.type() says "torch.cuda.*", by which Megatron 0.16.1 classifies
parameters (optimizer/optimizer.py and optimizer/distrib_optimizer.py). tests/trainer/test_patches.py fails
once one of these, or a patch of the files beside this one, is no longer needed.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _CudaTensorsOnCpu(TorchFunctionMode):
    """Rewrites calls of torch functions made in this thread while the mode is on."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            in_optimizer = (
                sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer")
            )
            return name.replace("torch.", "torch.cuda.", 1) if in_optimizer else name
        return func(*args, **kwargs)


class _CpuRngTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's named random streams, over the CPU's generator."""

    def add(self, name: str, seed: int) -> None:
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random.get_data_parallel_rng_tracker_name()) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def _get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


@contextlib.contextmanager
def replaced(module: object, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class _NoStream:
    """In place of torch.cuda.Stream and Event, for the token dispatcher of experts: nothing is asynchronous
    here."""

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        pass


_stream = _NoStream()


def _splits_on_host(
    tensor: torch.Tensor | None, as_numpy: bool = False, record_stream: bool = False
) -> object:
    """Megatron's own leaves a CPU tensor as it is, and torch's all-to-all takes no tensor for its splits."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_mode = _CudaTensorsOnCpu()
# What Megatron calls of torch.cuda, in megatron/core/optimizer, distributed, pipeline_parallel/schedules.py,
# tensor_parallel/random.py and transformer/moe/token_dispatcher.py.
REPLACED: tuple[tuple[object, str, Callable], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", lambda *args, **kwargs: None),
    (torch.cuda, "Stream", _NoStream),
    (torch.cuda, "current_stream", lambda *args: _stream),
    (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _splits_on_host),
    (megatron_random, "_get_cuda_rng_state", _get_state),
    (megatron_random, "_set_cuda_rng_state", _set_state),
)


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Around everything that builds, steps, saves or loads with Megatron. Not re-entrant; the rewriting holds
    for the calling thread."""
    if torch.cuda.is_available():
        yield
        return
    if not isinstance(megatron_random._CUDA_RNG_STATE_TRACKER, _CpuRngTracker):
        megatron_random._CUDA_RNG_STATE_TRACKER = _CpuRngTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    with contextlib.ExitStack() as stack:
        for module, name, value in REPLACED:
            stack.enter_context(replaced(module, name, value))
        stack.enter_context(_mode)
        yield


@contextlib.contextmanager
def native_calls() -> Iterator[None]:
    """Inside `cuda_as_cpu`: no rewriting of calls, which costs microseconds per torch function. For the
    forward pass, which asks for no "cuda" tensor."""
    if torch.cuda.is_available():
        yield
        return
    _mode.__exit__(None, None, None)
    try:
        yield
    finally:
        _mode.__enter__()
