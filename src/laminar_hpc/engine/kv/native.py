"""The C++ extension, or one line that says how to get it."""

import importlib
from types import ModuleType

from laminar_hpc.engine.kv.errors import KvRefused


def extension() -> ModuleType:
    """The module laminar_hpc._kv. Raises KvRefused where it was not built."""
    try:
        return importlib.import_module("laminar_hpc._kv")
    except ImportError as error:
        raise KvRefused(
            "KV migration needs laminar_hpc._kv, which cannot "
            f"be loaded ({error}): apt-get install g++, make setup"
        ) from None
