"""How many more trajectories a replica can begin while it generates others (refresh=versions). Pure; live
system and simulator use it.

A replica asks for no more than it can begin at once: what is granted and waits in its queue would age there,
and another replica could have begun it. So it asks for nothing while a request waits in its engine, and fills
its KV cache up to KV_SHARE, each new trajectory counted with the mean of those that it generates.

    >>> room(in_flight=10, queued=0, kv_tokens=5_000, kv_capacity=10_000, requests_max=64)
    8
    >>> room(in_flight=10, queued=1, kv_tokens=5_000, kv_capacity=10_000, requests_max=64)
    0
    >>> room(in_flight=0, queued=0, kv_tokens=0, kv_capacity=10_000, requests_max=64)
    64
"""

KV_SHARE = 0.9  # of the cache: the rest is left to the growth of what runs


def room(in_flight: int, queued: int, kv_tokens: float, kv_capacity: float, requests_max: int) -> int:
    """Trajectories that can begin at once beside `in_flight` ones, of which `queued` wait in the engine; of
    the `kv_capacity` tokens of its cache (0: not known yet) they hold `kv_tokens`."""
    if queued:
        return 0
    free = requests_max - in_flight
    if in_flight and kv_tokens and kv_capacity:
        free = min(free, int((KV_SHARE * kv_capacity - kv_tokens) * in_flight / kv_tokens))
    return max(0, free)


def held(max_staleness: int) -> int:
    """Weights that an engine holds at once. By the proof in admission.py what is not trained yet at step s is
    of steps s - `max_staleness` to s; those of step s + 1 are there before the controller knows it."""
    return max_staleness + 2
