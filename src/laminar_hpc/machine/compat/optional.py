"""Packages that others import where they find them, for features of which nothing is used here, and that cost
seconds to import."""

import contextlib
import sys
from collections.abc import Iterator
from typing import cast


def leave_out(name: str) -> None:
    """From now on `import name` finds no such package in this process, unless it is imported already."""
    cast("dict[str, object]", sys.modules).setdefault(name, None)


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """leave_out for the time of a block."""
    there = name in sys.modules
    leave_out(name)
    try:
        yield
    finally:
        if not there:
            del sys.modules[name]
