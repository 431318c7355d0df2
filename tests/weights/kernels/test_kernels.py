"""The Triton kernels without a GPU: bit-exact in Triton's interpreter, and compiled to PTX for the
architectures that are served."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from helpers.kernels import compiled
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.kernels import delta_encode, pack, place
from laminar_hpc.weights.kernels.grid import common_grid
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.triton_delta import BLOCK, compact_kernel, mark_kernel
from laminar_hpc.weights.kernels.triton_logprobs import gradient_kernel, summary_kernel
from laminar_hpc.weights.kernels.triton_pack import pack_kernel

CASES = [Path(__file__).with_name(name) for name in ("interpreted_cases.py", "interpreted_layers.py")]
PACK = {"BR": 1, "BC": 1024, "WIDE": False, "ALIGNED": True}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("marked", "cases"), [("not slow", 88), pytest.param("slow", 10, marks=pytest.mark.slow)]
)
def test_bit_exact_in_the_interpreter(marked: str, cases: int) -> None:
    """More than so many of the interpreted cases, in a process of its own, as TRITON_INTERPRET acts when
    triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, CASES), "-q", "-m", marked, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > cases and "skipped" not in done.stdout


PACKED = [
    ("*i32", "*i32", {"CAST": 0, "PAIRS": False}),  # float32 as it is, and pairs of 16-bit items as words
    ("*i16", "*i16", {"CAST": 0, "PAIRS": False}),
    ("*i32", "*i32", {"CAST": 1, "PAIRS": True}),
    ("*i32", "*i32", {"CAST": 2, "PAIRS": True}),
    ("*i32", "*i16", {"CAST": 1, "PAIRS": False}),
    ("*i32", "*i16", {"CAST": 2, "PAIRS": False}),
    ("*i32", "*i32", {"CAST": 1, "PAIRS": True, "WIDE": True, "BR": 2, "BC": 512}),
]


TABLES = {"slices": "*i64", "programs": "*i32", "sums": "*i64"}


def packed(source: str, target: str, constants: dict) -> dict:
    """The constants of a kind of slices."""
    items = {"*i16": tl.int16, "*i32": tl.int32}
    return {**PACK, **constants, "SOURCE": items[source], "TARGET": items[target]}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("source", "target", "constants"), PACKED)
def test_pack_compiles_ahead(source: str, target: str, constants: dict, capability: int) -> None:
    """PTX and machine code for sm_80 and sm_90; on real sizes memory is read and written 16 bytes at a
    time."""
    ptx = compiled(pack_kernel, packed(source, target, constants), capability, **TABLES)
    assert re.search(rf"\.target sm_{capability}", ptx)
    assert re.search(r"ld\.global\.v[48]\.b32", ptx) and re.search(r"st\.global\.v[48]\.b32", ptx)
    assert len(re.findall(r"atom\.global\S*\.add\.[us]64", ptx)) == 2


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("item", ["*i16", "*i32"])
def test_delta_compiles_ahead(item: str, capability: int) -> None:
    """As above; both images are read 16 bytes at a time."""
    words = {"marks": "*i32", "counts": "*i32", "ends": "*i32", "indices": "*i32"}
    for loaded, halves in ((item, False), ("*i32", True)):
        marked = compiled(
            mark_kernel, {"BLOCK": BLOCK, "HALVES": halves}, capability, new=loaded, old=loaded, **words
        )
        assert re.search(r"ld\.global\.v4\.b32", marked)
    compacted = compiled(compact_kernel, {"BLOCK": BLOCK}, capability, new=item, values=item, **words)
    assert f".target sm_{capability}" in compacted


LOGPROBS = {
    summary_kernel: {"logits": "*fp32", "places": "*i64", "found": "*fp32"},
    gradient_kernel: {
        "logits": "*fp32",
        "places": "*i64",
        "normalizers": "*fp32",
        "upstream": "*fp32",
        "entropies": "*fp32",
        "of_entropy": "*fp32",
        "out": "*bf16",
    },
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [(summary_kernel, {}), *((gradient_kernel, {"WITH_ENTROPY": entropy}) for entropy in (False, True))],
)
def test_logprobs_compile_ahead(kernel: triton.JITFunction, constants: dict, capability: int) -> None:
    """As above. A block of logits is read once, and of the gradient written once in 16 bits."""
    types = {**LOGPROBS[kernel], "temperature": "fp32", "inverse": "fp32"}
    ptx = compiled(kernel, {"SCALED": True, "BLOCK": 2048, **constants}, capability, **types)
    read = 4 * len(re.findall(r"ld\.global\.v4\.b32", ptx))
    assert read == 2048 // 128 and f".target sm_{capability}" in ptx
    if kernel is gradient_kernel:
        assert 8 * len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2048 // 128


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_specialisations_compile_ahead(capability: int) -> None:
    """Promise: for A100, Hopper and Blackwell, also where no argument is known to be divisible by 16, as with
    odd shapes and unaligned views, and where every integer is 1, which Triton compiles apart."""
    cases: list[tuple] = [
        (pack_kernel, {**packed(*case), "ALIGNED": aligned}, TABLES)
        for case in PACKED
        for aligned in (False, True)
    ]
    words = {"marks": "*i32", "counts": "*i32", "ends": "*i32", "indices": "*i32"}
    for item in ("*i16", "*i32"):
        images = {"new": item, "old": item, "values": item}
        cases.append((compact_kernel, {"BLOCK": BLOCK}, {**words, **images}))
        cases.append((mark_kernel, {"BLOCK": BLOCK, "HALVES": item == "*i32"}, {**words, **images}))
    for kernel, constants, types in cases:
        given = {name for name in kernel.arg_names if name not in constants and name not in types}
        for ones in ({}, dict.fromkeys(given, 1)):
            for divisible in (True, False):
                ptx = compiled(kernel, {**constants, **ones}, capability, divisible, **types)
                assert f".target sm_{capability}" in ptx


def test_what_no_kernel_can_do_is_refused() -> None:
    """One line before anything is written: another shape or dtype, a place outside the bucket, a delta of
    another image."""
    local = LocalSlice("w", (4, 2), 0, 0, 4, torch.zeros(4, 2, dtype=torch.bfloat16))
    for target in (
        torch.zeros(2, 4, dtype=torch.bfloat16),
        torch.zeros(4, 2, dtype=torch.float16),
        torch.zeros(4, 2, dtype=torch.int16),
    ):
        with pytest.raises(LaminarError, match="cannot pack w"):
            pack([local], [target])
    for offset in (1, 4):
        with pytest.raises(LaminarError, match="lay it out"):
            place(torch.zeros(16, dtype=torch.uint8), offset, (4, 2), torch.bfloat16)
    image = torch.zeros(5)
    for other in (torch.zeros(4), torch.zeros(5, dtype=torch.float16), torch.zeros(5, 1)):
        with pytest.raises(LaminarError, match="no delta between"):
            delta_encode(image, other)


def test_the_references_serve_the_cpu() -> None:
    """Sums are taken when asked for; a delta's size is that of its indices and values."""
    bucket, values = torch.zeros(16, dtype=torch.uint8), torch.tensor([1.0, 2.0, 3.0])
    target = place(bucket, 4, (3,), torch.bfloat16)
    sums = pack([LocalSlice("b", (3,), 0, 0, 3, values)], [target])
    assert target.tolist() == [1.0, 2.0, 3.0] and sums() == [(0x40003F80 + 0x4040, 0x40003F80 + 2 * 0x4040)]
    found = delta_encode(target, torch.tensor([1.0, 5.0, 3.0], dtype=torch.bfloat16))
    assert found.indices.tolist() == [1] and found.values.tolist() == [2.0] and found.nbytes == 6


def test_layouts_without_common_rows_are_refused() -> None:
    """A transposed source, or two layouts cut differently, would need a gather; no Megatron parameter is
    one."""
    assert common_grid([((2, 1, 3, 4), (60, 60, 4, 1)), ((6, 4), (4, 1))]) == (2, 12, (60, 12))
    assert common_grid([((5, 1), (7, 1)), ((5, 1), (1, 1))]) == (5, 1, (7, 1))
    for layouts in ([((3, 4), (1, 3))], [((2, 6), (9, 1)), ((4, 3), (9, 1))]):
        with pytest.raises(LaminarError, match="copy it first"):
            common_grid(layouts)
