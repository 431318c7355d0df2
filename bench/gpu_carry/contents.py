"""What travels and what does not: the tables of the packer."""

import re

# ---- packages ----------------------------------------------------------------------------------------------

# The target has them: a torch for CUDA 13 brings the libraries, and nvcc the compiler. Triton 3.6 of a torch
# 2.11 serves torch 2.13; its wheel alone would double what is carried.
PROVIDED = """
    cuda-toolkit nvidia-cublas nvidia-cuda-crt nvidia-cuda-cupti nvidia-cuda-nvcc nvidia-cuda-nvdisasm
    nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand
    nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
    nvidia-nvvm triton
""".split()

# Nothing here imports them: other attention backends than FlashAttention 3 and flashinfer (with the compilers
# of FlashAttention 4), experts spread over nodes, sound and pictures, hubs other than Hugging Face's.
LEFT_OUT = """
    cryptography cython humming-kernels mistral-common modelscope modelscope-hub nccl4py nvidia-cudnn-frontend
    nvidia-cutlass-dsl-libs-cu12 nvidia-cutlass-dsl-libs-cu13 nvidia-mathdx nvshmem4py-cu13 pycountry
    sgl-deep-ep tilelang timm tokenspeed-mla tokenspeed-triton torchcodec z3-solver
""".split()

# For whoever installs, checks or publishes; the tests themselves are run on the target too.
TOOLS = """
    ast-serialize build gitdb gitpython librt mypy mypy-extensions pip pyproject-hooks ruff sentry-sdk smmap
    wandb wheel
""".split()

# Their versions matter, so they are carried beside others of the same name: torch's C++ interface and what is
# compiled against it, SGLang with the libraries whose internals it imports, and what its kernels are called
# through. Of other packages the target's version does. numpy is one of them: scipy, pandas, pyarrow and numba
# are compiled for one another, so that the target's set stays whole.
EXACT = """
    apache-tvm-ffi compressed-tensors flashinfer-python megatron-core nvidia-nccl-cu13 sgl-deep-gemm sglang
    sglang-kernel tokenizers torch torch-c-dlpack-ext torch-memory-saver torchaudio torchvision transformers
    xgrammar
""".split()

NO_WHEEL = ["antlr4-python3-runtime"]  # pure Python that PyPI has as source only

# ---- files -------------------------------------------------------------------------------------------------

# No run opens them. Headers that SGLang compiles with are those of cccl, tvm_ffi, flashinfer and deep_gemm.
DROPPED = """
    **/*.a **/__pycache__ bin include share
    torch/include torch/share torch/test torch/bin/protoc* torchgen/packaged nvidia/nccl/include
    numpy/**/tests pandas/tests scipy/**/tests sympy/**/tests matplotlib/tests networkx/**/tests
    numba/tests pyarrow/tests pyarrow/include matplotlib/mpl-data/sample_data datasets/**/tests
    sgl_kernel/infllm_ops.*.so zstandard/_cffi.*.so
""".split()


def other_kernels(arch: int) -> str:
    """The folder of sglang-kernel that a GPU of `arch` does not open: Hopper has one, the others another."""
    return "sgl_kernel/sm100" if arch // 10 == 9 else "sgl_kernel/sm90"


# By architecture and file name: the kernels to keep of a library that has far more than runs call. SGLang's
# FlashAttention 3 is over a gigabyte; kept are bfloat16 heads of 64 and 128 without softcap.
ONLY = {
    90: {
        "flash_ops.abi3.so": re.compile(
            rb"(?<!ILi192EEEEE)ELi(?:64|128)ENS_10bfloat16_tEfNS_4arch4Sm90ELb[01]ELb[01]ELb0E"
            rb"|prepare_varlen_num_blocks_kernel|FlashAttnFwdCombine"
        )
    }
}
