"""Slices: ranges of the canonical tensors, the one unit in which weights are planned, packed and loaded."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

SliceKey = tuple[str, int]


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + length) along `dim` of the tensor `name`, whose whole shape is `shape`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    length: int

    @property
    def key(self) -> SliceKey:
        """Returns what tells a process's slices apart: of one tensor it may hold several."""
        return self.name, self.start

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def below(self, place: int) -> int:
        """How many of the slice's items come before item `place` of the whole tensor, both in row-major
        order."""
        inner = math.prod(self.shape[self.dim + 1 :])
        block, inside = divmod(place, self.shape[self.dim] * inner)
        return block * self.length * inner + min(max(inside - self.start * inner, 0), self.length * inner)

    def place(self, item: int) -> int:
        """The place in the whole tensor of item `item` of the slice, both in row-major order."""
        inner = math.prod(self.shape[self.dim + 1 :])
        block, inside = divmod(item, self.length * inner)
        return (block * self.shape[self.dim] + self.start) * inner + inside


@dataclass(frozen=True)
class LocalSlice(Slice):
    """A slice in this process's memory. `view` shares that of a parameter; it may split a dimension in
    several."""

    view: torch.Tensor

    def load(self, values: torch.Tensor) -> None:
        """Copies `values`, of shape `slice_shape` and any float dtype, into the parameter."""
        self.view.copy_(values.reshape(self.view.shape))

    def value(self) -> torch.Tensor:
        """The slice as Hugging Face has it: a view of the parameter where the layouts agree, else a copy."""
        return self.view.reshape(self.slice_shape)


def by_key(local: Iterable[LocalSlice]) -> dict[SliceKey, LocalSlice]:
    """The first of each key: a tied embedding comes before its copy."""
    found: dict[SliceKey, LocalSlice] = {}
    for each in local:
        found.setdefault(each.key, each)
    return found
