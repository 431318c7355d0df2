"""Python's cyclic garbage collector in the controller's process. A full collection looks at every object: a
third of a second with 131,072 trajectories in flight, in which no message is answered; and cycles are rare.
"""

import gc

# objects more than before a young collection; young ones before a middle one; middle ones before a full one
_THRESHOLDS = (2_000, 10, 10_000)


def collect_rarely() -> None:
    """Called once, when all is built: full collections come hours apart and pass over what is there now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
