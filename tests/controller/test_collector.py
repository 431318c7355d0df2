"""docs/architecture.md#turns: no turn waits for the collector to look at all that the controller knows."""

import gc

from laminar_hpc.controller.collector import collect_rarely


def full_collections() -> int:
    """While a million objects are made and kept."""
    seen = []
    gc.callbacks.append(lambda phase, info: phase == "stop" and seen.append(info["generation"]))
    try:
        kept = [[i] for i in range(1_000_000)]
    finally:
        gc.callbacks.pop()
    assert len(kept) == 1_000_000
    return seen.count(2)


def test_full_collections_are_rare():
    before = gc.get_threshold()
    assert full_collections() > 0
    try:
        collect_rarely()
        assert full_collections() == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
