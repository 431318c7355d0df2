"""Rewards tried before anything starts, in a worker process as in the run: are they there, and do they give
rewards?

`check_functions` imports them; `first_call` calls each once, on a first row, with that row's own answer as
the response. What can only be a mistake is refused. A call that raises or takes too long is only warned
about: the response is not one of the model's.
"""

import asyncio
import dataclasses

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import label
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.environments.reward_protocol import Result

_CURES = {
    "value": "return a number, or a dict with 'reward' and numbers",
    "arguments": "give the rows that field (data.*), or change the function",
    "refused": "check the URL, its style and its api_key_env",
}


def check_functions(config: RunConfig) -> None:
    """Raises LaminarError when a reward function is not there, cannot be imported, or has parameters of
    another style."""
    asyncio.run(_results(config, None))


def first_call(config: RunConfig, prompt: str, row: dict) -> list[str]:
    """Warnings, one line each. Raises LaminarError as `check_functions`, and for what is returned but is
    no reward."""
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


def _pool(config: RunConfig) -> RewardPool:
    return RewardPool(dataclasses.replace(config.reward, workers=1), config.data.prompt_field, quiet=True)


async def _results(config: RunConfig, first: tuple[str, str, dict] | None) -> dict[str, Result]:
    pool = _pool(config)
    await pool.start()
    try:
        return await pool.call_each(*first) if first else {}
    finally:
        await pool.close()
