"""Selective recomputation that costs bytes and no product of matrices: what a norm or an activation gives is
freed as soon as the linear layer behind it has used it, and made again right before that layer's backward
pass, from what is kept anyway. Called by trainer/megatron/building.py.

Megatron's own (0.16.1, tensor_parallel/random.py, `CheckpointWithoutOutput`) needs Transformer Engine, and
saves and restores the states of all random generators, of which nothing here draws.
"""

from collections.abc import Callable

import torch


def forget(tensor: torch.Tensor, again: Callable[[], torch.Tensor], used_by: torch.Tensor) -> None:
    """Frees the memory of `tensor`, which nobody but the operation that gave `used_by` has saved. When the
    gradient of `used_by` is there, `again` makes the same values once more."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)

    def restore(_: torch.Tensor) -> None:
        with torch.no_grad():
            values = again().contiguous()
        storage.resize_(nbytes)
        storage.copy_(values.untyped_storage())

    used_by.register_hook(restore)


class Forgetting:
    """Joins a module to the linear layer behind it, Megatron's or Transformer Engine's, whose input is the
    module's output and nobody else's. Where that layer keeps a copy of its input, nothing is gained."""

    def __init__(self, module: torch.nn.Module, linear: torch.nn.Module) -> None:
        self._module = module
        self._source: torch.Tensor | None = None
        module.register_forward_hook(self._note)
        linear.register_forward_hook(self._forget)

    def _note(self, module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self._source = inputs[0]

    def _forget(self, linear: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
        source, self._source = self._source, None
        if source is None or not outputs[0].requires_grad:
            return
        kept = source.detach()
        forget(inputs[0], lambda: self._module.forward(kept), outputs[0])
