"""The kernels in plain torch: what runs on the CPU, and what the Triton kernels are held against, bit by
bit."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import LazySums, slice_sums


class Delta(NamedTuple):
    """Changed elements of a flat image: where (int32, ascending) and what (the image's dtype); both
    [changed]."""

    indices: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes


def pack(slices: Sequence[LocalSlice], targets: Sequence[torch.Tensor]) -> None:
    """Each slice into its target, which has the slice's `slice_shape`; torch's cast rounds to nearest
    even."""
    for local, target in zip(slices, targets, strict=True):
        target.view(local.view.shape).copy_(local.view)


def sums(slices: Sequence[LocalSlice], targets: Sequence[torch.Tensor]) -> LazySums:
    """Gives what each packed slice adds to the sums of its whole tensor; holds on to the targets, not to the
    slices' views."""
    packed = [(t, p.shape, p.dim, p.start) for p, t in zip(slices, targets, strict=True)]
    return lambda: [slice_sums(*one) if one[0].numel() else (0, 0) for one in packed]


def bits(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: -0.0 differs from 0.0, a NaN equals itself."""
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)


def delta_encode(new: torch.Tensor, old: torch.Tensor) -> Delta:
    """The elements of `new` whose bits differ from `old`; both flat, of one length and dtype."""
    changed = torch.nonzero(bits(new) != bits(old)).view(-1)
    return Delta(changed.to(torch.int32), new[changed])
