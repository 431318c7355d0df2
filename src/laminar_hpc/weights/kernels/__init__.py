"""What moves weights between layouts and keeps count of them: pack and delta encode.

Pack and encode are Triton kernels (triton_pack.py, triton_delta.py) beside plain-torch references
(reference.py) that give the same bits. The functions here are what the rest of the system calls; they, and
nothing else, choose: tensors on a GPU go to the kernels, all others to the references.
"""

import math
from collections.abc import Sequence

import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.kernels import host, reference
from laminar_hpc.weights.kernels.reference import Delta
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import LazySums, shifted

__all__ = ["LONGEST", "Delta", "delta_encode", "pack", "place"]

# elements per delta: an index has 32 bits, and a kernel's last block may reach beyond the end
LONGEST = 2**31 - 2**16
_MODULUS = 1 << 64


def place(bucket: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The contiguous tensor of `shape` and `dtype` that begins at byte `offset` of a bucket (flat uint8);
    shares its memory.

    Raises LaminarError when it does not fit.
    """
    end = offset + torch.Size(shape).numel() * dtype.itemsize
    if end > bucket.numel() or offset % dtype.itemsize:
        raise LaminarError(
            f"bytes [{offset}, {end}) are no {dtype} in a bucket of "
            f"{bucket.numel()} bytes; lay it out with manifest.layout"
        )
    return bucket[offset:end].view(dtype).view(tuple(shape))


def pack(slices: Sequence[LocalSlice], targets: Sequence[torch.Tensor]) -> LazySums:
    """Copies each slice, reordered and rounded to nearest even, into its target, which has the slice's
    `slice_shape`.

    A target is a `place` in a bucket, or a narrowed part of one; its dtype (float32, bfloat16, float16) is
    the serving dtype. Slices are float32, or have the serving dtype already. A slice may be empty; a NaN
    stays a NaN, of no particular payload.

    Returns a function that gives each slice's part of the two checksums of its whole tensor
    (weights/kernels/sums.py). They are taken in the same pass, and on a GPU reading them waits for it; on the
    CPU those of slices that are cast, or do not lie on whole words, are taken when asked for, from the
    targets, which must be untouched until then. Raises LaminarError on other shapes or dtypes.
    """
    if targets and targets[0].is_cuda:
        from laminar_hpc.weights.kernels.triton_pack import pack as on_gpu

        taken = on_gpu(slices, targets, _check_target)
        return lambda: [(first % _MODULUS, second % _MODULUS) for first, second in taken.tolist()]
    for local, target in zip(slices, targets, strict=True):
        _check_target(local, target)
    parts = [_pack_on_host(local, target) for local, target in zip(slices, targets, strict=True)]
    return lambda: [both for part in parts for both in part()]


def _pack_on_host(local: LocalSlice, target: torch.Tensor) -> LazySums:
    """In one pass where that is possible, else by the reference."""
    strides = [math.prod(local.shape[dim + 1 :]) for dim in range(len(local.shape))]
    word, inside = divmod(local.start * strides[local.dim] * target.element_size(), 4)
    both = host.move(target, local.view, local.slice_shape, strides) if not inside else None
    if both is None:
        reference.pack(local, target)
        return reference.sums(local, target)
    total = shifted(both, word)
    return lambda: [total]


def delta_encode(new: torch.Tensor, old: torch.Tensor) -> Delta:
    """The elements of `new` whose bits are not those of `old`: flat, of equal dtype (4 or 2 bytes an item)
    and length, at most LONGEST.

    Indices ascend. Waits for the device, whose count sizes the answer. Raises LaminarError on unequal or
    longer images.
    """
    if (
        new.shape != old.shape
        or new.dtype != old.dtype
        or new.dim() != 1
        or new.numel() > LONGEST
        or new.dtype.itemsize not in (2, 4)
    ):
        raise LaminarError(
            f"no delta between {tuple(old.shape)} {old.dtype} and {tuple(new.shape)} {new.dtype}: two flat "
            "images of one length and dtype "
            f"are needed, of at most {LONGEST} elements of 2 or 4 bytes; encode bucket by bucket"
        )
    if new.is_cuda:
        from laminar_hpc.weights.kernels.triton_delta import encode as on_gpu

        return on_gpu(new, old)
    return reference.delta_encode(new, old)


def _check_target(local: LocalSlice, target: torch.Tensor) -> None:
    known = target.dtype in (torch.float32, torch.bfloat16, torch.float16) and local.view.dtype in (
        torch.float32,
        target.dtype,
    )
    if not known or tuple(target.shape) != local.slice_shape or target.device != local.view.device:
        raise LaminarError(
            f"cannot pack {local.name} {local.slice_shape} {local.view.dtype} on "
            f"{local.view.device} into {tuple(target.shape)} {target.dtype} on {target.device}; "
            "a target has the slice's shape and device, and a float32 or equal dtype as source"
        )
