"""Triton kernels compiled for GPUs that are not here."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(
    kernel: triton.JITFunction, constants: dict, capability: int, divisible: bool = True, **types: str
) -> str:
    """PTX of a kernel whose arguments are all divisible by 16, as those of real models are, or not known to
    be."""
    signature = {
        name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names
    }
    names = [] if not divisible else [name for name in kernel.arg_names if name not in constants]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    made = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", capability, 32)
    )
    assert len(made.asm["cubin"]) > 1000  # the assembler takes it
    return made.asm["ptx"]
