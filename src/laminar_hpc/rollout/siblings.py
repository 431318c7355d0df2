"""Samples of one prompt say much the same. A trajectory that moves takes along what its group has finished,
so that the engine to which it comes can guess from it (`rollout.speculation`).

`TrajectoryInFlight.siblings` has it, one list for all samples of a group on a replica.
"""

from collections.abc import Sequence

import numpy as np

from laminar_hpc.config.system_schema import RolloutConfig
from laminar_hpc.line.messages.data import TOKEN_BYTES

TAKEN_TOKENS = 8192  # of them that a move takes along, 32 kB
BETWEEN = np.array([-1], "<i4").tobytes()  # stands between two responses, and is no token


def are_wanted(rollout: RolloutConfig) -> bool:
    """Whether the run's engines guess from what others have said."""
    return rollout.speculation in ("suffix", "auto")


def taken_along(siblings: Sequence[bytes]) -> bytes:
    """The newest of `siblings`, the last ones, in their order and with BETWEEN between them; at most
    TAKEN_TOKENS of responses, of which the first may be cut. Tokens are int32."""
    left, taken = TOKEN_BYTES * TAKEN_TOKENS, list[bytes]()
    for response in reversed(siblings):
        if left <= 0:
            break
        taken.insert(0, response[:left])
        left -= len(response)
    return BETWEEN.join(taken)


def as_tokens(taken: bytes) -> list[int]:
    """What `taken_along` gave, as an engine takes it."""
    tokens: list[int] = np.frombuffer(taken, "<i4").tolist()
    return tokens
