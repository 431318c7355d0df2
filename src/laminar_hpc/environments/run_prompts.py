"""The prompts of a run: of its files, or of its environment's taskset, as the run's chat template, tools and
environment render them."""

from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.models import model_config
from laminar_hpc.config.rope import positions
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import labels, parse_source
from laminar_hpc.data.chat_template import continued, load_chat_template
from laminar_hpc.data.prompts import Prompt, PromptSet, RowRender, check_token_ids, load_prompts
from laminar_hpc.data.tokens import load_tokenizer
from laminar_hpc.environments.turns.model import endless
from laminar_hpc.environments.turns.preflight import prompt_render
from laminar_hpc.environments.verifiers.rows import run_rows
from laminar_hpc.machine.observability import console


def run_render(config: RunConfig) -> RowRender | None:
    """How the run's prompts become text; None: they are text. Raises LaminarError where that cannot be."""
    if not config.data.chat_template:
        return None
    if not config.environment.several:
        render = load_chat_template(config.model.path, (), config.data.chat_template_arguments)
        return lambda messages, where, row: render(messages, where, continued(messages))
    return prompt_render(config)


def load_run_prompts(
    config: RunConfig, say: Callable[[str], None]
) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """(training prompts, held-out prompts by the file's name) of a run, checked against tokenizer and model;
    `say` prints what was read and left out. A replay reads none. Raises Refused with the mistakes of all
    files."""
    if config.source.startswith("replay:"):
        return [], {}
    tokenizer = load_tokenizer(config.model.path)
    render = run_render(config)
    model = model_config(config.model.path)
    context = min(config.trainer.pack_tokens, positions(model) or 1 << 30)
    room = context - config.sampling.max_response_tokens - 1
    kept = 1 if config.environment.by_url else None

    wrong: list[str] = []

    def read(key: str, name: str, limit: int | None = None) -> PromptSet | None:
        try:
            source = parse_source(key, name)
            prompts = load_prompts(source, config.data, tokenizer, render, room, limit, kept)
            check_token_ids(prompts, model["vocab_size"])
            for number, prompt in enumerate(prompts.prompts if config.environment.verifiers else (), 1):
                if not isinstance(prompt.row.get("task"), dict):
                    raise LaminarError(
                        f"{key}={name}: its row {number} has no task; leave data.train out, and let `python "
                        "-m laminar_hpc.environments.verifiers.rows` write evaluation.files"
                    )
        except LaminarError as error:
            wrong.extend(str(error).splitlines())
            return None
        say(console.line("data", prompts.summary()))
        return prompts

    name, key = config.data.train, "evaluation.files"
    if config.brings_rows:
        name = run_rows(config.environment, config.run_dir)
    train = read("data.train", name)
    held_out = [read(key, name, config.evaluation.problems) for name in config.evaluation.files]
    if train is None or wrong:
        raise Refused(wrong)
    for text in endless(config):
        say(console.line("warning", text))
    found = [each for each in held_out if each is not None]
    names = labels(key, [each.source for each in found])
    return train.prompts, {name: each.prompts for name, each in zip(names, found, strict=True)}
