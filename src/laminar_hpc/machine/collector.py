"""Python's cyclic garbage collector, kept from looking again and again at what is no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# objects more than before a young collection; young ones before a middle one; middle ones before a full one
_THRESHOLDS = (2_000, 10, 10_000)


def collect_rarely() -> None:
    """Called once, when all is built: full collections come hours apart and pass over what is there now.

    In the controller's process a full collection looks at every object: a third of a second with 131,072
    trajectories in flight, in which no message is answered; and cycles are rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def without_collector() -> Iterator[None]:
    """For a block that makes no large cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """For a block that imports large libraries: the collector would look at their objects, which are never
    garbage, for a quarter of the block's time and in each full collection from then on."""
    with without_collector():
        yield
        gc.freeze()
