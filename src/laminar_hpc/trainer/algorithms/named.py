"""The function that a setting names: one of a table, or the user's own by its dotted path."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from laminar_hpc.config.objectives import is_own
from laminar_hpc.config.user_code import load_function


def found_in(table: Mapping[str, Callable[..., Any]], key: str, name: str) -> Callable[..., Any]:
    """`key`: advantage, loss or corrections. Raises LaminarError where there is no such function."""
    return _own(key, name) if is_own(name) else table[name]


@cache
def _own(key: str, path: str) -> Callable[..., Any]:
    return load_function(path, f"algorithm.{key}={path}")
