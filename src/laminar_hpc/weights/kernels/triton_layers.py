"""Triton: weights/kernels/layers.py's functions. A program per token of a rotation, a row of a norm; of a
norm's gradient so many rows that each program's part of the weight's gradient stays in registers."""

import torch
import triton
import triton.language as tl

PROGRAMS = 264  # of a norm's gradient: two for each multiprocessor of a Hopper GPU
WIDEST = 16_384  # columns of a norm that fit into one program's registers


@triton.jit
def _rotate_heads(
    x, out, token_stride, head_stride, heads, half, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (lane < half)
    source = x + token * token_stride + head * head_stride + lane
    target = out + token * heads * half * 2 + head * half * 2 + lane
    low = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
    tl.store(target, (low * cos - high * sin).to(out.dtype.element_ty), mask=there)
    tl.store(target + half, (high * cos + low * sin).to(out.dtype.element_ty), mask=there)


@triton.jit
def rotate_kernel(
    query,
    key,
    query_out,
    key_out,
    cos,
    sin,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    query_heads,
    key_heads,
    half,
    direction,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """cos and sin float32 [tokens, 2 * half], of which the second halves are the formula's. The outputs are
    contiguous. direction: 1, or -1 for the gradient."""
    lane = tl.arange(0, HALF)[None, :]
    factor = tl.program_id(0).to(tl.int64) * 2 * half + half + lane
    c = tl.load(cos + factor, mask=lane < half, other=0.0)
    s = tl.load(sin + factor, mask=lane < half, other=0.0) * direction
    _rotate_heads(
        query, query_out, query_token_stride, query_head_stride, query_heads, half, c, s, QUERY_HEADS, HALF
    )
    _rotate_heads(key, key_out, key_token_stride, key_head_stride, key_heads, half, c, s, KEY_HEADS, HALF)


@triton.jit
def norm_kernel(
    output,
    residual,
    weight,
    total,
    normed,
    scales,
    columns,
    epsilon,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Without ADD `residual` is what is normalized, and neither `output` nor `total` is touched."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < columns
    at = row.to(tl.int64) * columns + column
    x = tl.load(residual + at, mask=there, other=0.0)
    if ADD:
        x = x.to(output.dtype.element_ty).to(tl.float32)
        x += tl.load(output + at, mask=there, other=0.0).to(tl.float32)
        tl.store(total + at, x, mask=there)
    x = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(x * x, 0) / columns + epsilon)
    tl.store(scales + row, scale)
    w = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + at, (x * scale * w).to(normed.dtype.element_ty), mask=there)


@triton.jit
def norm_gradient_kernel(
    of_normed,
    of_total,
    total,
    scales,
    weight,
    of_output,
    of_residual,
    of_weight,
    rows,
    columns,
    ADD: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """of_weight float32 [programs, columns]. SUMMED: there is a gradient of the total. Without ADD `total` is
    what was normalized, and `of_residual`, of its dtype, the gradient of it."""
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < columns
    w = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    at = first.to(tl.int64) * columns + column
    for row in range(first, rows, tl.num_programs(0)):
        scale = tl.load(scales + row)
        upstream = tl.load(of_normed + at, mask=there, other=0.0).to(tl.float32)
        x = tl.load(total + at, mask=there, other=0.0).to(tl.float32) * scale
        sums += upstream * x
        upstream *= w
        slope = (upstream - x * (tl.sum(upstream * x, 0) / columns)) * scale
        if SUMMED:
            slope += tl.load(of_total + at, mask=there, other=0.0)
        if ADD:
            rounded = slope.to(of_output.dtype.element_ty)
            tl.store(of_output + at, rounded, mask=there)
            slope = rounded.to(tl.float32)
        tl.store(of_residual + at, slope.to(of_residual.dtype.element_ty), mask=there)
        at += tl.num_programs(0).to(tl.int64) * columns
    tl.store(of_weight + first.to(tl.int64) * columns + column, sums, mask=there)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    outs = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key))
    tokens, query_heads, width = query.shape
    if tokens:
        rotate_kernel[(tokens,)](
            *(query, key, *outs, cos, sin),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
            *(query_heads, key.shape[1], width // 2, direction),
            QUERY_HEADS=triton.next_power_of_2(query_heads),
            KEY_HEADS=triton.next_power_of_2(key.shape[1]),
            HALF=triton.next_power_of_2(width // 2),
            enable_fp_fusion=False,  # else a product is not rounded before it is added to
        )
    return outs[0], outs[1]


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))


def norm(
    output: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = residual.shape[-1]
    rows, block = residual.numel() // columns, triton.next_power_of_2(columns)
    normed = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device)
    scales = torch.empty(rows, dtype=torch.float32, device=residual.device)
    total = residual if output is None else torch.empty_like(normed, dtype=torch.float32)
    if rows:
        norm_kernel[(rows,)](
            *(total if output is None else output, residual, weight, total, normed, scales),
            *(columns, epsilon),
            ADD=output is not None,
            BLOCK=block,
            num_warps=_warps(block),
            enable_fp_fusion=False,
        )
    return total, normed, scales


def norm_gradient(
    of_normed: torch.Tensor,
    of_total: torch.Tensor | None,
    total: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    output_dtype: torch.dtype | None,
    residual_dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    columns, rows = total.shape[-1], len(scales)
    block, programs = triton.next_power_of_2(columns), max(1, min(rows, PROGRAMS))
    of_residual = torch.empty_like(total, dtype=residual_dtype)
    of_output = None if output_dtype is None else torch.empty_like(total, dtype=output_dtype)
    parts = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
    norm_gradient_kernel[(programs,)](
        *(of_normed, total if of_total is None else of_total, total, scales, weight),
        *(of_residual if of_output is None else of_output, of_residual, parts, rows, columns),
        ADD=of_output is not None,
        SUMMED=of_total is not None,
        BLOCK=block,
        num_warps=_warps(block),
        enable_fp_fusion=False,
    )
    return of_output, of_residual, parts.sum(0)
