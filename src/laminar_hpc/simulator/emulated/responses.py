"""What an emulated engine answers: lengths and tokens that follow from the trajectory's number alone.

Whoever generates a trajectory, in however many parts, gives the same response; a test can tell a lost,
doubled or misplaced token.
"""

import math
import random

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.simulator.constants import GROUP_CORRELATION
from laminar_hpc.store.payload.layout import Logprobs, Tokens

_PERIOD = 251  # of the invented tokens and log-probs


def response_length(
    trajectory_id: int,
    group: int,
    median: float,
    sigma: float,
    max_tokens: int,
    prompt: bytes = b"",
    prompt_correlation: float = 0.0,
) -> int:
    """Log-normal, at most `max_tokens`; those of one group are correlated (LAMINAR: lengths inside one
    prompt's group are similar), and by `prompt_correlation` those of all groups of `prompt`."""
    shared, own = (
        random.Random(f"0:{kind}").gauss(0.0, 1.0) for kind in (f"group{group}", f"one{trajectory_id}")
    )
    if prompt_correlation:
        kept = prompt_correlation / GROUP_CORRELATION
        always = random.Random(b"prompt" + prompt).gauss(0.0, 1.0)
        shared = math.sqrt(kept) * always + math.sqrt(1.0 - kept) * shared
    z = math.sqrt(GROUP_CORRELATION) * shared + math.sqrt(1.0 - GROUP_CORRELATION) * own
    return max(1, min(max_tokens, round(median * math.exp(sigma * z))))


def tokens(trajectory_id: int, start: int, end: int, vocabulary: int) -> Tokens:
    """Tokens [start, end) of the response, each below `vocabulary`."""
    return (_places(trajectory_id, start, end) % vocabulary).astype(np.int32)


def logprobs(trajectory_id: int, start: int, end: int) -> Logprobs:
    """Their behaviour log-probs: multiples of 1/256, so that they are the same in every format."""
    return (-(_places(trajectory_id, start, end) + 1) / 256).astype(np.float32)


def routes(replica: int, start: int, end: int, shape: RouteShape) -> bytes:
    """Routes of the tokens at places [start, end), which say who has computed them and where."""
    places = replica * 37 + np.arange(start, end)[:, None, None]
    experts = places + np.arange(len(shape.layers))[:, None] + np.arange(shape.per_token)
    return (experts % shape.experts).astype(np.dtype(shape.dtype).newbyteorder("<")).tobytes()


def _places(trajectory_id: int, start: int, end: int) -> NDArray[np.int64]:
    """Where each token is in the period."""
    return (trajectory_id * 37 + np.arange(start, end)) % _PERIOD
