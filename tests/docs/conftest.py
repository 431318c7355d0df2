"""Sources are parsed here."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_finalizers() -> Iterator[None]:
    """CPython 3.11's ast.parse fails when a finalizer inside it formats a traceback, which parses as well."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
