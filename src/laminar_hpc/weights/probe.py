"""The fixed probe: a few token sequences whose log-probs trainer and engine both compute, so that the
log-prob mismatch is measured at every weight id.

Used by trainer/megatron/policy.py and rollout/worker.py. Depends on the vocabulary's size alone; imports
nothing heavy.
"""

import random

SEQUENCES, TOKENS = 4, 32
_SEED = 20260101


def probe_sequences(vocab_size: int) -> list[list[int]]:
    """SEQUENCES sequences of TOKENS token ids, uniform over range(vocab_size). Their log-probs are those of
    tokens 1.. given the prefix, at temperature 1, flattened: SEQUENCES * (TOKENS - 1) values."""
    draw = random.Random(_SEED)
    return [[draw.randrange(vocab_size) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
