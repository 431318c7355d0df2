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
    if extension is None or not (target.is_cpu and source.is_cpu) or not target.numel():
        return None
    if target.dtype != source.dtype or target.numel() != source.numel():
        return None
    size = target.element_size()
    if target.is_contiguous() and source.is_contiguous() and _without_gaps(shape, strides):  # most are
        rows, width = 1, target.numel() * size
        to_stride = from_stride = apart = width
    else:
        whole = (shape, strides) if shape is not None and strides is not None else ((target.numel(),), (1,))
        try:
            grid = common_grid([(target.shape, target.stride()), (source.shape, source.stride()), whole])
        except LaminarError:
            return None
        rows, width = grid.rows, grid.columns * size
        to_stride, from_stride, apart = (items * size for items in grid.strides)
    to, begin = target.data_ptr(), source.data_ptr()
    if (width | to_stride | from_stride | apart | to | begin) % 4:
        return None
    if to == begin:  # what was received in place has sums only
        to = 0
    place = (to, to_stride, begin, from_stride, rows, width // 4, apart // 4)
    return extension.move(*place, torch.get_num_threads())


def _without_gaps(shape: Sequence[int] | None, strides: Sequence[int] | None) -> bool:
    """Whether the items of such a grid follow on each other."""
    if shape is None or strides is None:
        return True
    expected = 1
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected and count != 1:
            return False
        expected *= count
    return True
