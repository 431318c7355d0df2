"""Strided layouts of one slice, seen as rows of contiguous columns: what lets a single kernel serve every row
of weights/mapping.py.

A query head's group, a shard's columns, a half of gate/up: in the Megatron parameter, in the bucket and in
the whole Hugging Face tensor each of them is [rows, columns] with one stride between rows, once the
dimensions that lie next to each other are merged.
"""

from collections.abc import Sequence
from typing import NamedTuple

from laminar_hpc.config.errors import LaminarError


class Grid(NamedTuple):
    """`strides`: items from one row to the next, of each of the layouts."""

    rows: int
    columns: int
    strides: tuple[int, ...]


def common_grid(layouts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Grid:
    """The fewest rows in which all layouts (shape, strides in items) of one slice, in row-major order, can be
    walked.

    Raises LaminarError when there is no such grid.
    """
    merged = [_rows(*layout) for layout in layouts]
    rows, columns = max((grid[:2] for grid in merged), key=lambda grid: grid[0])
    strides = []
    for own_rows, own_columns, stride in merged:
        if own_rows != 1 and (own_rows, own_columns) != (rows, columns):
            raise LaminarError(
                f"a slice of {own_rows} rows of {own_columns} cannot "
                f"be packed as {rows} rows of {columns}; copy it first"
            )
        strides.append(columns if own_rows == 1 else stride)
    return Grid(rows, columns, tuple(strides))


def _rows(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Rows, columns and stride of one layout. Dimensions of size 1 have no say."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if not dims or dims[-1][1] != 1:
        dims.append((1, 1))
    if len(dims) > 2:
        raise LaminarError(
            f"a slice of shape {tuple(shape)} and strides {tuple(strides)} is not made of rows; copy it first"
        )
    return (1, dims[0][0], dims[0][0]) if len(dims) == 1 else (dims[0][0], dims[1][0], dims[0][1])
