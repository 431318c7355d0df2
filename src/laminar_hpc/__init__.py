"""Laminar: asynchronous RL post-training of language models on Megatron-core, SGLang and NCCL.

`Run` starts or opens a run from Python (launch/python_api.py), and its errors are `LaminarError`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LaminarError", "Run", "__version__"]

if TYPE_CHECKING:
    from laminar_hpc.config.errors import LaminarError
    from laminar_hpc.launch.python_api import LaminarRun as Run


def __getattr__(name: str) -> object:
    """Both are imported when they are asked for: a role or a command waits for neither."""
    if name == "Run":
        from laminar_hpc.launch.python_api import LaminarRun

        return LaminarRun
    if name == "LaminarError":
        from laminar_hpc.config.errors import LaminarError

        return LaminarError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
