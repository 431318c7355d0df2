"""What model.deterministic asks of a trainer rank: the same batch gives the same bits of gradients and of
weights.

On a GPU torch takes deterministic kernels, and refuses by name what has none; cuBLAS, NCCL and Transformer
Engine are told by environment variables, before they are first used. On the CPU forward passes are those of
the engine (weights/kernels/fixed_order.py), so that log-probs are equal to the last bit. Called by
trainer/world.py.
"""

import os

import torch

from laminar_hpc.config.determinism import refuse_on_cpu
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.weights.kernels import fixed_order

# Each is read once, by a library when it is first used in a process. The first value is set where the user
# has set none; only these are deterministic, of NCCL whatever is fixed.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # else its kernels share workspaces
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),  # Transformer Engine's attention
    "NCCL_ALGO": ("Ring",),  # else NCCL chooses by the size of the message and what it knows of the machine
}


def set_variables() -> None:
    """Raises LaminarError where the user has set a value that is not deterministic."""
    for name, values in _VARIABLES.items():
        given = os.environ.setdefault(name, values[0])
        if name != "NCCL_ALGO" and given not in values:
            raise LaminarError(f"model.deterministic=true needs {name}={values[0]}, not {given}; unset it")


def become_deterministic(config: RunConfig) -> None:
    """In this process, before anything of CUDA is used or a model is built. Raises LaminarError for what
    cannot be."""
    if not config.model.deterministic:
        return
    set_variables()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it finds errors; nothing depends on it
    if not torch.cuda.is_available():
        refuse_on_cpu(config)
        fixed_order.install()
