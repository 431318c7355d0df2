"""What cannot work with `critic` and algorithm.advantage=gae, in the way of rules.py. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from laminar_hpc.config.learning_schema import CriticConfig
from laminar_hpc.config.objectives import GAE, SEQUENCE_LOSSES
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.teachers import unlike


def wrong_critic(config: RunConfig, policy: dict[str, Any] | None) -> Iterator[str]:
    """One line each; `policy`: the config.json of model.path, None where it cannot be read."""
    a, default = config.algorithm, CriticConfig()
    if a.advantage != GAE:
        for name, value in vars(default).items():
            if getattr(config.critic, name) != value:
                yield f"@critic.{name} does nothing without algorithm.advantage={GAE}: leave it out"
        return
    if a.loss in SEQUENCE_LOSSES:
        yield f"@algorithm.loss has one advantage per sequence, {GAE} one per token: use another loss"
    if a.zero_variance == "estimate":
        yield f"@algorithm.zero_variance is of groups, and {GAE} has none: use keep or filter"
    if config.critic.warmup_steps >= config.steps:
        yield "@critic.warmup_steps leaves none of @steps to the policy; lower it"
    if not config.dry_run and policy is not None:
        yield from other_critic(config, policy)


def other_critic(config: RunConfig, policy: dict[str, Any]) -> Iterator[str]:
    """A critic's directory that is not there, or of another architecture."""
    path = config.critic.path if config.algorithm.advantage == GAE else ""
    if path and (what := unlike(path, policy)):
        yield f"critic.path={path}: {what}; name a directory of the policy's architecture"
