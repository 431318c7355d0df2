"""Rewards tried before anything starts, in a worker process as in the run: are they there, and do they give
rewards?

`check_functions` imports them; `first_call` calls each once, on a first row, with that row's own answer as
the response. What can only be a mistake is refused. A call that raises or takes too long is only warned
about: the response is not one of the model's.
"""

import asyncio
import dataclasses
import os
from collections.abc import Sequence

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import label, reward_functions
from laminar_hpc.config.schema import RewardConfig, RunConfig
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.environments.workers.protocol import CallResult

_MATH = "laminar_hpc.environments.math"
MAX_DOUBTS = 20  # lines
_CURES = {
    "value": "return a number, or a dict with 'reward' and numbers",
    "arguments": "give the rows that field (data.*), or change the function",
    "refused": "check the URL, its style and its api_key_env",
}


def check_functions(config: RunConfig) -> None:
    """Raises LaminarError when a reward function is missing, cannot be imported, or has other parameters."""
    asyncio.run(_results(config, None))


def first_call(config: RunConfig, prompt: str, row: dict) -> list[str]:
    """Warnings, one line each. Raises LaminarError as `check_functions`, and for what is no reward."""
    response = str(row.get("answer", ""))
    results = asyncio.run(_results(config, (prompt, response, row)))
    warnings = []
    tried = "with its own answer as the response" if response else "with an empty response"
    for name, entry in _pool(config).entries.items():
        got, what = results[name], label(name, entry)
        if got.fault in _CURES:
            raise LaminarError(
                f"{what} on the first row, {tried}: {got.error}; {_CURES[got.fault]} (docs/rewards.md)"
            )
        if got.error:
            fields = f"; the row has {', '.join(map(str, row))}" if got.error.startswith("KeyError") else ""
            warnings.append(f"warning: {what} failed on the first row, {tried}: {got.error}{fields}")
    return warnings


def golds_in_doubt(config: RunConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Warnings, one line for each right answer that the mathematics reward cannot read, or reads as mere
    text; none without that reward."""
    if not prompts or not any(
        entry.function == f"{_MATH}.reward" for entry in reward_functions(config.reward).values()
    ):
        return []
    first = {str(prompt.row.get("answer")): prompt for prompt in reversed(prompts)}
    found = asyncio.run(_read_golds([prompt.row for prompt in first.values()]))
    doubts = [
        f"warning: {prompt.where}: its answer {answer!r:.60} {got.error.rpartition(': ')[2]}"
        for (answer, prompt), got in zip(first.items(), found, strict=True)
        if got.error
    ][::-1]
    more = len(doubts) - MAX_DOUBTS
    return doubts[:MAX_DOUBTS] + [f"warning: {more} more answers are like these"] * (more > 0)


async def _read_golds(rows: list[dict]) -> list[CallResult]:
    cores, function = len(os.sched_getaffinity(0)), f"{_MATH}.readable"
    config = RewardConfig(function=function, workers=cores, timeout_seconds=10.0)
    async with RewardPool(config, quiet=True) as pool:
        called = await asyncio.gather(*(pool.call_each("", "", row) for row in rows))
        return [result for each in called for result in each.values()]


def _pool(config: RunConfig) -> RewardPool:
    return RewardPool(dataclasses.replace(config.reward, workers=1), config.data.prompt_field, quiet=True)


async def _results(config: RunConfig, first: tuple[str, str, dict] | None) -> dict[str, CallResult]:
    async with _pool(config) as pool:
        return await pool.call_each(*first) if first else {}
