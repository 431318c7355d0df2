"""The kernels in plain torch: what runs on the CPU, and what the Triton kernels are held against, bit by
bit."""

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


def pack(local: LocalSlice, target: torch.Tensor) -> None:
    """The slice into its target, which has its `slice_shape`; torch's cast rounds to nearest even."""
    target.view(local.view.shape).copy_(local.view)


def sums(local: LocalSlice, target: torch.Tensor) -> LazySums:
    """Gives what the packed slice adds to the sums of its whole tensor; holds on to the target, not to the
    slice's view."""
    shape, dim, start = local.shape, local.dim, local.start
    return lambda: [slice_sums(target, shape, dim, start) if target.numel() else (0, 0)]


def bits(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: -0.0 differs from 0.0, a NaN equals itself."""
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)


def delta_encode(new: torch.Tensor, old: torch.Tensor) -> Delta:
    """The elements of `new` whose bits differ from `old`; both flat, of one length and dtype."""
    changed = torch.nonzero(bits(new) != bits(old)).view(-1)
    return Delta(changed.to(torch.int32), new[changed])
