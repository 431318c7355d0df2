"""Promises about time, on machines that may stand still for a second or two at any moment."""

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

P = ParamSpec("P")
TRIES = 3


def but_for_a_stall(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Made again when it fails: a stall breaks a promise about time once, a fault breaks it each time."""

    @functools.wraps(test)
    async def tried(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(TRIES - 1):
            try:
                return await test(*args, **kwargs)
            except AssertionError:
                continue
        return await test(*args, **kwargs)

    return tried
