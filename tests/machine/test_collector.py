"""The collector looks at no objects again and again that are no garbage."""

import gc

from laminar_hpc.machine.collector import collect_rarely, importing


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
    """docs/promises.md#turns: no turn waits for the collector to look at all that the controller knows."""
    before = gc.get_threshold()
    try:
        assert full_collections() > 0
        collect_rarely()
        assert full_collections() == 0
    finally:
        gc.set_threshold(*before)


def test_what_was_imported_is_not_looked_at():
    """Promise: neither during the imports, nor in a full collection after them."""
    with importing():
        assert not gc.isenabled()
        modules = [[i] for i in range(10_000)]
    assert gc.isenabled() and not any(each is modules for each in gc.get_objects())
    assert gc.get_freeze_count() >= len(modules)
