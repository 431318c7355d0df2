"""Rewards as the controller sees them: tried on a first row before anything starts, and watched for errors
while the run goes on."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from laminar_hpc.config.rewards import SINGLE, reward_functions
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import parse_source
from laminar_hpc.data.prompts import Prompt, load_prompts
from laminar_hpc.data.tokens import load_tokenizer
from laminar_hpc.environments import preflight
from laminar_hpc.environments.run_prompts import run_render
from laminar_hpc.line.messages.rollouts import Scored
from laminar_hpc.machine.observability import console


def check_rewards(config: RunConfig) -> None:
    """For a command line: refuses what can only be a mistake, in environments too. A dry run has no rows, so
    it calls no function."""
    if config.environment.several and not config.source.startswith("replay:"):
        from laminar_hpc.environments.turns.preflight import check_environment

        check_environment(config)
    named = bool(config.reward.function or config.reward.functions)
    if config.dry_run and named and not config.source.startswith("replay:"):
        preflight.check_functions(config)
    elif not config.dry_run:
        try_rewards(config, lambda _: None)  # the controller says the warnings


def try_rewards(config: RunConfig, say: Callable[[str], None], prompts: list[Prompt] | None = None) -> None:
    """Calls every reward once, on the first of `prompts`, else on the first row of data.train. Raises
    LaminarError for a mistake."""
    if config.source.startswith("replay:") or not reward_functions(config.reward):
        return
    if prompts is None and config.brings_rows:
        return  # the controller has them
    first = (prompts or _first_prompt(config))[0]
    for warning in preflight.first_call(config, first.text, first.row):
        say(console.line("reward", warning))


def say_doubts(config: RunConfig, say: Callable[[str], None], sources: Iterable[list[Prompt]]) -> None:
    """Says which rows have an answer that the mathematics reward cannot read."""
    for doubt in preflight.golds_in_doubt(config, [prompt for source in sources for prompt in source]):
        say(console.line("reward", doubt))


def _first_prompt(config: RunConfig) -> list[Prompt]:
    data = dataclasses.replace(config.data, too_long="drop", max_prompt_tokens=None)
    render = run_render(config)
    tokenizer = load_tokenizer(config.model.path)
    kept = 1 if config.environment.by_url else None
    source = parse_source("data.train", data.train)
    return load_prompts(source, data, tokenizer, render, 1 << 30, limit=1, kept=kept).prompts


class RewardErrors:
    """Counts them, says the first, and tells when a whole batch of responses has failed in a row."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self._batch = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
        self._instead = config.reward.score_on_failure
        self._say = say
        self._keys = "reward.function" if SINGLE in reward_functions(config.reward) else "reward.functions"
        self._logs = Path(config.run_dir) / "logs"
        self.scored = self.count = self.in_a_row = 0
        self.first = ""

    def take(self, scored: Scored) -> str:
        """Why the run should end, or ""."""
        self.scored += 1
        if not scored.error:
            self.in_a_row = 0
            return ""
        self.count += 1
        self.in_a_row += 1
        if not self.first:
            self.first = scored.error
            what = f"trajectory {scored.trajectory_id}" + (" of an evaluation" if scored.evaluation else "")
            self._say(
                console.line(
                    "reward", f"the first error, {what}: {scored.error} (it counts as {self._instead:g})"
                )
            )
        if self.in_a_row < self._batch:
            return ""
        which = "first" if self.in_a_row == self.scored else "last"
        return (
            f"the rewards of the {which} {self.in_a_row} responses, a whole batch, "
            f"all failed, the last with: {scored.error}; mend {self._keys} "
            f"(docs/rewards.md; its output is in {self._logs}/rollout*.log)"
        )
