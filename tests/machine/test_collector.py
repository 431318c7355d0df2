"""docs/promises.md#turns: no turn waits for the collector to look at all that the controller knows."""

import gc

from laminar_hpc.machine.collector import collect_rarely


def full_collections() -> int:
    """While many objects are made and kept, beside few that the collector looks at."""
    gc.freeze()
    gc.collect()
    seen = []
    gc.callbacks.append(lambda phase, info: phase == "stop" and seen.append(info["generation"]))
    try:
        kept = [[i] for i in range(200_000)]
    finally:
        gc.callbacks.pop()
    assert len(kept) == 200_000
    return seen.count(2)


def test_full_collections_are_rare():
    before = gc.get_threshold()
    try:
        assert full_collections() > 0
        collect_rarely()
        assert full_collections() == 0
    finally:
        gc.set_threshold(*before)
