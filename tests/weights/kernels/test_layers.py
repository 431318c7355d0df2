"""What the kernels of RoPE, and of the residual sum with its norm, move on GPUs; their values are in
interpreted_layers.py."""

import re

import pytest

from helpers.kernels import compiled
from laminar_hpc.weights.kernels import triton_layers

BLOCK = 4096
NORM = {"output": "*bf16", "residual": "*fp32", "weight": "*bf16", "total": "*fp32", "normed": "*bf16"}
GRADIENT = {
    "of_normed": "*bf16",
    "of_total": "*fp32",
    "total": "*fp32",
    "weight": "*bf16",
    "of_output": "*bf16",
    "of_residual": "*fp32",
    "of_weight": "*fp32",
}
ROTATED = {"query": "*bf16", "key": "*bf16", "query_out": "*bf16", "key_out": "*bf16"}


def bytes_moved(ptx: str) -> tuple[int, int]:
    """Of a thread, by its instructions: read, written."""
    moved = {"ld": 0, "st": 0}
    for kind, vector, bits in re.findall(r"(ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx):
        moved[kind] += int(vector or 1) * int(bits) // 8
    return moved["ld"], moved["st"]


@pytest.mark.parametrize("capability", [80, 90])
def test_bytes_of_a_sum_and_its_norm(capability: int) -> None:
    """Promise: 12 bytes of each element, 6 read and 6 written, and the weight; 16 for the gradient, 10 and 6,
    the weight, and a float32 for each program's part of the weight's gradient. Each is one launch."""
    each = BLOCK // 128  # elements of a thread of four warps
    constants = {"ADD": True, "BLOCK": BLOCK}
    types = {**NORM, "scales": "*fp32", "epsilon": "fp32"}
    read, written = bytes_moved(compiled(triton_layers.norm_kernel, constants, capability, **types))
    assert (read, written - 4) == ((2 + 4 + 2) * each, (4 + 2) * each), "4: the scale of the row"
    constants = {"ADD": True, "SUMMED": True, "BLOCK": BLOCK}
    ptx = compiled(triton_layers.norm_gradient_kernel, constants, capability, **GRADIENT, scales="*fp32")
    read, written = bytes_moved(ptx)
    assert (read - 4, written) == ((2 + 4 + 4 + 2) * each, (2 + 4 + 4) * each)
    assert f".target sm_{capability}" in ptx


@pytest.mark.parametrize("capability", [80, 90])
def test_bytes_of_a_rotation(capability: int) -> None:
    """Promise: queries and keys are read once and written once, 4 bytes of each element, in one launch; 16
    bytes at a time."""
    constants = {"QUERY_HEADS": 32, "KEY_HEADS": 8, "HALF": 64}
    types = {**ROTATED, "cos": "*fp32", "sin": "*fp32", "direction": "fp32"}
    ptx = compiled(triton_layers.rotate_kernel, constants, capability, **types)
    read, written = bytes_moved(ptx)
    each = (32 + 8) * 128 // 128
    assert written == 2 * each
    assert read - 2 * each <= 4 * 24, "the factors, of which threads that share them read the same 512 bytes"
    assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_layer_kernels_compile_ahead(capability: int) -> None:
    """Also where nothing is known to be divisible by 16, without a sum, and in float32."""
    for divisible in (True, False):
        for add in (True, False):
            types = {**NORM, "scales": "*fp32", "epsilon": "fp32"}
            constants = {"ADD": add, "BLOCK": BLOCK}
            compiled(triton_layers.norm_kernel, constants, capability, divisible, **types)
            for summed in (True, False):
                constants = {"ADD": add, "SUMMED": summed, "BLOCK": BLOCK}
                compiled(
                    *(triton_layers.norm_gradient_kernel, constants, capability, divisible),
                    **GRADIENT,
                    scales="*fp32",
                )
        constants = {"QUERY_HEADS": 16, "KEY_HEADS": 2, "HALF": 32}
        types = {**dict.fromkeys(ROTATED, "*fp32"), "cos": "*fp32", "sin": "*fp32", "direction": "fp32"}
        compiled(triton_layers.rotate_kernel, constants, capability, divisible, **types)
