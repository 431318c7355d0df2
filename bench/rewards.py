"""Rewards of benches, imported by reward workers, which search the folder that `laminar` was started in.

`reward.function=bench.rewards.waiting`: the arithmetic example's behind a wait, as if a judge or a sandbox
had to answer first. The wait is log-normal (median 0.2 s, 99th percentile 3 s), asleep and not at work, and
each call draws its own: the n-th call with the same prompt and response always waits equally long, so that
runs can be compared.

`reward.function=bench.rewards.drawn`: by chance.
"""

import asyncio
import collections
import hashlib
import math
import random
import statistics

from laminar_hpc.environments import arithmetic

MEDIAN_SECONDS, P99_SECONDS = 0.2, 3.0
_NORMAL = statistics.NormalDist()
_SIGMA = math.log(P99_SECONDS / MEDIAN_SECONDS) / _NORMAL.inv_cdf(0.99)
# cut at this quantile on both sides: the longest wait is 15 s, and reward.timeout_seconds can exceed it
_TAIL = 1e-4
TIMEOUT_SECONDS = 30.0
_calls: collections.Counter[tuple[str, str]] = collections.Counter()  # of this worker


def wait_seconds(prompt: str, response: str, call: int) -> float:
    """The log-normal's quantile at a hash of the text and of how many calls with it came before."""
    digest = hashlib.sha256(f"{prompt}\0{response}\0{call}".encode()).digest()
    share = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
    return MEDIAN_SECONDS * math.exp(_SIGMA * _NORMAL.inv_cdf(min(max(share, _TAIL), 1 - _TAIL)))


async def waiting(*, prompt: str, response: str, row: dict) -> dict[str, float]:
    """`arithmetic.reward` after the wait."""
    call = _calls[prompt, response]
    _calls[prompt, response] += 1
    await asyncio.sleep(wait_seconds(prompt, response, call))
    return arithmetic.reward(prompt=prompt, response=response, row=row)


def drawn(*, prompt: str, response: str, row: dict) -> float:
    """For models with random weights: they answer nothing right, and where all rewards are equal no step
    changes the weights."""
    return random.random()
