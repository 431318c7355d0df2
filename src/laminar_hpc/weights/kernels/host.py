"""Copies in host memory with checksums made on the way, in one pass, by as many threads as torch uses
(csrc/sums.cpp). What that cannot do is left to torch."""

from collections.abc import Sequence

import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.kernels.grid import common_grid
from laminar_hpc.weights.kernels.sums import extension


def move(
    target: torch.Tensor,
    source: torch.Tensor,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> tuple[int, int] | None:
    """Copies `source` into `target`, of equal dtype and as many elements, in row-major order; returns the
    sums of what then stands there.

    The elements' places in the whole tensor (weights/kernels/sums.py), counted from the first one: a grid of
    `shape` and `strides` in items; default: without gaps. None, and nothing is copied, where the extension is
    missing, a row does not begin and end with a word, or the tensors are not made of rows in host memory.
    """
    if (
        extension is None
        or target.dtype != source.dtype
        or target.numel() != source.numel()
        or not target.numel()
    ):
        return None
    if target.device.type != "cpu" or source.device.type != "cpu":
        return None
    whole = (shape, strides) if shape is not None and strides is not None else ((target.numel(),), (1,))
    try:
        grid = common_grid([(target.shape, target.stride()), (source.shape, source.stride()), whole])
    except LaminarError:
        return None
    width, to_stride, from_stride, apart = (
        items * target.element_size() for items in (grid.columns, *grid.strides)
    )
    if any(
        number % 4 for number in (width, to_stride, from_stride, apart, target.data_ptr(), source.data_ptr())
    ):
        return None
    # what was received in place has sums only
    to = 0 if target.data_ptr() == source.data_ptr() else target.data_ptr()
    place = (to, to_stride, source.data_ptr(), from_stride, grid.rows, width // 4, apart // 4)
    return extension.move(*place, torch.get_num_threads())
