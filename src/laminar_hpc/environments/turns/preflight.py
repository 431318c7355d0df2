"""Environments tried before anything starts, in a worker process as in the run: can they be imported, are
they environments, and do the model's conversations only grow?"""

import asyncio
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.chat_template import Messages, continued, load_chat_template
from laminar_hpc.data.prompts import RowRender
from laminar_hpc.data.tokens import check_rows
from laminar_hpc.environments.turns.model import check_first_token, conversation
from laminar_hpc.environments.turns.pool import EnvironmentPool, environment_of
from laminar_hpc.environments.verifiers.process import loaded

Tools = dict[str, list[dict]]


def check_environment(config: RunConfig) -> Tools:
    """The tools, as JSON schemas, by name of the environment. Raises LaminarError for what cannot work; a dry
    run's model need not be there."""
    tools, rewards = asyncio.run(_served(config))
    environment, own = config.environment, bool(reward_functions(config.reward))
    for name, path in environment.factories.items():
        if (name in rewards) == own:
            which = "get_reward, and reward.function is set too: leave one of the two out"
            neither = "no get_reward: add it, or set reward.function"
            raise LaminarError(f"environment.factory: {path} has {which if own else neither}")
    if (Path(config.model.path) / "config.json").exists() or not config.dry_run:
        arguments = config.data.chat_template_arguments
        check_rows(Path(config.model.path))
        if environment.by_url:  # it has tools of its own, which are tried when it comes with them
            check_first_token(config.model.path, arguments)
        else:
            for each in tools.values():
                grows = environment.history == "refuse"
                conversation(config.model.path, each, grows=grows, arguments=arguments)
    return tools


async def _served(config: RunConfig) -> tuple[Tools, list[str]]:
    if config.environment.verifiers:
        async with loaded(config.environment, quiet=True):
            return {"": []}, []
    async with EnvironmentPool(config.environment, quiet=True) as pool:
        return pool.tools, pool.rewards


def prompt_render(config: RunConfig) -> RowRender:
    """Of a run's prompts, each with the tools of its row's environment. With a factory they end where the
    last user's words do, as reset may add to them; the rest is Conversation.opening. With an agent only their
    first token is used."""
    environment, model = config.environment, config.model.path
    tools, arguments = check_environment(config), config.data.chat_template_arguments
    renders = {name: load_chat_template(model, each, arguments) for name, each in tools.items()}
    closings, grows = dict.fromkeys(tools, ""), environment.history == "refuse"
    branches = environment.history == "branch" and not environment.by_url
    if environment.factory or branches:
        closings = {
            name: conversation(model, each, grows=grows, arguments=arguments).closing
            for name, each in tools.items()
        }

    def text(messages: Messages, where: str, row: dict) -> str:
        name = environment_of(environment, row, where)
        whole, closing = renders[name](messages, where, continued(messages)), closings[name]
        if not whole.endswith(closing):
            key = "factory" if environment.factory else "history=branch"
            raise LaminarError(
                f"{where}: with environment.{key} a prompt ends with the user's words; mend the row"
            )
        return whole.removesuffix(closing) if environment.factory else whole

    return text
