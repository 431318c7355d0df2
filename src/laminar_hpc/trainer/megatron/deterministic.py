"""What model.deterministic asks of a trainer rank: the same batch gives the same bits of gradients and weights.

On a GPU torch takes deterministic kernels, and refuses by name what has none; cuBLAS, NCCL and Transformer
Engine are told by environment variables, before they are first used. On the CPU forward passes are also those
of the engine (weights/kernels/fixed_order.py), so that log-probs are equal to the last bit. Called by
trainer/world.py and policy.py.
"""

import os

import torch

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.weights.kernels import fixed_order

# Read once, by a library when it is first used in a process; a user's own setting is checked in
# config/determinism.py.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: else kernels on several streams share workspaces
    "NCCL_ALGO": "Ring",  # else NCCL chooses by what it measures
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
}


def set_variables(config: RunConfig) -> None:
    """Before anything of CUDA is used; what the user has set stands."""
    if config.model.deterministic:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)


def take_deterministic_operations(config: RunConfig) -> None:
    """In this process, before the model is built. Raises LaminarError on the CPU without the extension."""
    if not config.model.deterministic:
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it finds errors; nothing depends on it
    if not torch.cuda.is_available():
        fixed_order.install()
