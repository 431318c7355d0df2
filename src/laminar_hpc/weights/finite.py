"""Whether weights are finite, at the speed of memory; and, where they are not, which tensors and values are
at fault."""

from collections.abc import Iterable, Sequence

import torch

_NAMED = 3  # tensors that an error names


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """One pass over each tensor (any shape, floating point; smallest and largest value), one wait for the
    device."""
    ends = [torch.stack(tensor.aminmax()) for tensor in tensors if tensor.numel()]
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def culprits(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The tensors (name, values) that hold NaN or an infinity, in words: "a.weight (2 of 64 values, the first
    at [0, 3])"."""
    wrong_tensors = []
    for name, tensor in tensors:
        if not all_finite([tensor]):
            wrong = (~torch.isfinite(tensor)).nonzero()
            wrong_tensors.append(
                f"{name} ({len(wrong):,} of {tensor.numel():,} values, the first at {wrong[0].tolist()})"
            )
    more = f" and {len(wrong_tensors) - _NAMED} more tensors" if len(wrong_tensors) > _NAMED else ""
    return ", ".join(wrong_tensors[:_NAMED]) + more
