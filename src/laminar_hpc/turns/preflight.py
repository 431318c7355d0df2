"""Environments tried before anything starts, in a worker process as in the run: can they be imported, are
they environments, and do the model's conversations only grow?"""

import asyncio
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.chat_template import Messages, Render, load_chat_template
from laminar_hpc.turns.model import check_first_token, conversation
from laminar_hpc.turns.pool import EnvironmentPool


def check_environment(config: RunConfig) -> list[dict]:
    """The tools, as JSON schemas. Raises LaminarError for what cannot work; a dry run's model need not be
    there."""
    tools, rewards = asyncio.run(_served(config))
    environment, own = config.environment, bool(reward_functions(config.reward))
    if environment.factory and rewards == own:
        which = "get_reward, and reward.function is set too: leave one of the two out"
        neither = "no get_reward: add it, or set reward.function"
        raise LaminarError(f"environment.factory={environment.factory} has {which if own else neither}")
    if (Path(config.model.path) / "config.json").exists() or not config.dry_run:
        if environment.agent:  # it has tools of its own, which are tried when it comes with them
            check_first_token(config.model.path)
        else:
            conversation(config.model.path, tools)
    return tools


async def _served(config: RunConfig) -> tuple[list[dict], bool]:
    pool = EnvironmentPool(config.environment, quiet=True)
    await pool.start()
    await pool.close()
    return pool.tools, pool.rewards


def prompt_render(config: RunConfig) -> Render:
    """Of a run's prompts. With a factory they end where the last user's words do, as reset may add to them;
    the rest is Conversation.opening. With an agent only their first token is used."""
    tools = check_environment(config)
    render, closing = load_chat_template(config.model.path, tools), ""
    if config.environment.factory:
        closing = conversation(config.model.path, tools).closing

    def text(messages: Messages, where: str) -> str:
        whole = render(messages, where)
        if not whole.endswith(closing):
            raise LaminarError(
                f"{where}: with environment.factory a prompt ends with the user's words; mend the row"
            )
        return whole.removesuffix(closing)

    return text
