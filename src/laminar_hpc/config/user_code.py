"""The user's own functions, which settings name by a dotted path: rewards, tools, agents, losses. Imports no
torch."""

import importlib
import os
import sys
from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError, did_you_mean

_MAX_ERROR = 300  # characters that are told of an exception of theirs


def load_function(path: str, label: str) -> Callable:
    """The callable at a dotted path, searched from the current folder on too. Raises LaminarError when
    there is none."""
    module_name, _, name = path.rpartition(".")
    if not module_name or set("/:") & set(path):
        raise LaminarError(
            f"{label} is no dotted path: write it as module.function, where module.py is in the current "
            "folder or one of PYTHONPATH"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        cure = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            cure = f"; {module_name}.py must be in the current folder or one of PYTHONPATH"
        raise LaminarError(
            f"{label} cannot be imported: {type(error).__name__}: {str(error)[:_MAX_ERROR]}{cure}"
        ) from None
    if not hasattr(module, name):
        raise LaminarError(f"{label}: {module_name} has no '{name}'{did_you_mean(name, vars(module))}")
    function = getattr(module, name)
    if not callable(function):
        raise LaminarError(f"{label} is a {type(function).__name__}, not a function")
    return function
