"""Triton: weights/kernels/logprobs.py's two functions, a program per row, or per block of a row."""

import torch
import triton
import triton.language as tl

from laminar_hpc.weights.kernels.logprobs import EntropySlope

SUMMARY = {"BLOCK": 8192, "num_warps": 8}
GRADIENT = {"BLOCK": 4096, "num_warps": 8}


@triton.jit
def _over(x, divisor, inverse):
    """x / divisor, rounded once: a division of its own costs a third of the speed."""
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def summary_kernel(
    logits,
    places,
    found,
    stride,
    rows,
    columns,
    real,
    temperature,
    inverse,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """found float32 [4, rows]. SCALED: the temperature is not 1. -1e30 is weights/kernels/logprobs.py's
    LEAST."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    top = -1e30
    total = 0.0
    weighted = 0.0
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # `columns` are a multiple of what is read at once, `real` may not be
        x = tl.load(logits + column, mask=column < columns, other=0.0)
        if SCALED:
            x = _over(x, temperature, inverse)
        x = tl.where(column < real, x, -1e30)
        greatest = tl.maximum(top, tl.max(x, 0))
        shifted = x - greatest
        weights = tl.exp(shifted)
        lower = top - greatest
        scale = tl.exp(lower)
        weighted = (weighted + total * lower) * scale + tl.sum(weights * shifted, 0)
        total = total * scale + tl.sum(weights, 0)
        top = greatest
    place = tl.load(places + row)
    own = tl.load(logits + place, mask=place >= 0, other=0.0)
    if SCALED:
        own = _over(own, temperature, inverse)
    tl.store(found + row, top)
    tl.store(found + rows + row, total)
    tl.store(found + 2 * rows + row, weighted)
    tl.store(found + 3 * rows + row, own)


@triton.jit
def gradient_kernel(
    logits,
    places,
    normalizers,
    upstream,
    entropies,
    of_entropy,
    out,
    stride,
    out_stride,
    columns,
    real,
    temperature,
    inverse,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    """Without WITH_ENTROPY the two vectors of the entropy are not read."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < columns, other=0.0)
    from_above = tl.load(upstream + row) * inverse
    if SCALED:
        x = _over(x, temperature, inverse)
    x -= tl.load(normalizers + row)
    if WITH_ENTROPY:
        weight = from_above + tl.load(of_entropy + row) * inverse * (x + tl.load(entropies + row))
        slope = -weight * tl.exp(x)
    else:
        slope = -from_above * tl.exp(x)
    slope += tl.where(column == tl.load(places + row), from_above, 0.0)
    slope = tl.where(column < real, slope, 0.0).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * out_stride + column, slope, mask=column < columns)


def _scale(temperature: float) -> tuple[float, float, bool]:
    """The kernels' last arguments before BLOCK."""
    return float(temperature), 1 / temperature, temperature != 1


def summary(logits: torch.Tensor, places: torch.Tensor, real: int, temperature: float) -> torch.Tensor:
    rows, columns = logits.shape
    found = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        summary_kernel[(rows,)](
            *(logits, places, found, logits.stride(0), rows, columns, real),
            *_scale(temperature),
            **SUMMARY,
        )
    return found


def gradient(
    logits: torch.Tensor,
    places: torch.Tensor,
    real: int,
    temperature: float,
    normalizers: torch.Tensor,
    upstream: torch.Tensor,
    entropy: EntropySlope | None,
    out: torch.Tensor,
) -> None:
    rows, columns = logits.shape
    entropies, of_entropy = entropy or (normalizers, upstream)
    if rows:
        gradient_kernel[(triton.cdiv(columns, GRADIENT["BLOCK"]), rows)](
            *(logits, places, normalizers, upstream, entropies, of_entropy, out),
            *(logits.stride(0), out.stride(0), columns, real),
            *_scale(temperature),
            **GRADIENT,
            WITH_ENTROPY=entropy is not None,
        )
