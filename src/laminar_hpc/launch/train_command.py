"""`laminar train`: everything is checked, then a dry run shows what would start, or the job starts. With
options of config/options.py the configuration is shown, or one run made for each combination of values.

Whatever can be refused is refused here, before any rank is up: words and values, model and data, rewards
(each is called once), this machine's memory and ports. Parts are imported when they are called, so that a
refusal need not wait for them.
"""

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar_hpc.config.check import (
    Derived,
    check,
    check_machine,
    derived_values,
    missing_inputs,
    problems,
    supported_model,
    warnings,
)
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError, Refused, said
from laminar_hpc.config.load import group_names, load_config
from laminar_hpc.config.options import with_absolute_config_dir
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.observability import output


def main(options: Namespace) -> int:
    """Refuses, or shows, or starts what the words ask for."""
    words = options.words
    if options.slurm is not None and not options.multirun:
        raise LaminarError(
            "--slurm submits the jobs of --multirun: add it; or submit one run with "
            "`sbatch slurm/laminar_single.sbatch key=value ...`"
        )
    if options.cfg:
        from laminar_hpc.config.show import composed

        print(composed(words, options.cfg))
        return 0
    if options.info:
        from laminar_hpc.config.show import information

        print(information(words, options.info))
        return 0
    if not words:
        raise LaminarError(
            "laminar train needs a model, prompts and a reward: try `laminar train "
            "experiment=demo`, or name your own with model.path=DIR data.train=FILE "
            "reward.function=MODULE.NAME; `laminar train --help` shows more"
        )
    output.guard()
    if options.multirun:
        from laminar_hpc.launch import multirun

        every = multirun.combinations(words, lambda chosen: prepare(chosen, lambda _: None)[1])
        if options.slurm is None or load_config(every[0].words).dry_run:
            return multirun.run_here(every)
        return multirun.submit(every, options.slurm)
    loaded, config, derived = prepare(words, print)
    if config.dry_run:
        show(config, derived)
        return 0
    from laminar_hpc.data.pretrained import pinned_words

    return start(config, derived, [*with_absolute_config_dir(words), *pinned_words(loaded, config)])


def prepare(words: Sequence[str], say: Callable[[str], None]) -> tuple[RunConfig, RunConfig, Derived]:
    """(as the words have it, with the model's files resolved, what follows). Raises Refused for whatever can
    be refused without a look at this machine, and then for what is wrong with rows and rewards too."""
    from laminar_hpc.data.pretrained import resolve_model
    from laminar_hpc.engine.sglang.command_line import refused_arguments
    from laminar_hpc.simulator.emulation.constants import unknown_constants
    from laminar_hpc.weights.hf import read_shape

    loaded = config = load_config(words, of_inputs)
    try:
        config = resolve_model(loaded, say)
        lines = said(check, config)
    except LaminarError as error:
        lines = [str(error), *problems(loaded, may_download=True)]
    # a dry run may know it by name
    if (Path(config.model.path) / "config.json").is_file() and not said(supported_model, config):
        lines += said(read_shape, config.model.path)
    lines += [*refused_arguments(config), *unknown_constants(config)]
    if lines:
        raise Refused(dict.fromkeys([*lines, *of_inputs(config, lines)]))
    return loaded, config, check(config)


def of_inputs(config: RunConfig, lines: Sequence[str]) -> list[str]:
    """What is wrong with the rows and rewards of a configuration that is refused for `lines`. Rewards are
    imported and not called, unless `lines` say that their own settings are wrong."""
    from laminar_hpc.controller.trajectories.rewards import check_rewards
    from laminar_hpc.data.prompts import wrong_first_rows

    rows = [] if config.dry_run else wrong_first_rows(config)
    if any(line.startswith(("reward.", "environment.")) for line in lines):
        return rows
    return [*rows, *said(check_rewards, dataclasses.replace(config, dry_run=True))]


def show(config: RunConfig, derived: Derived) -> None:
    """What `dry_run=true` prints. Raises LaminarError for what could not start on any machine of its kind."""
    from laminar_hpc.controller.trajectories.rewards import check_rewards
    from laminar_hpc.environments.turns.model import endless
    from laminar_hpc.machine.gpu_memory import check_dry_run
    from laminar_hpc.machine.observability import console

    if lines := [*said(check_dry_run, config, derived), *said(check_rewards, config)]:
        raise Refused(lines)
    for text in console.dry_run_lines(derived_values(config, derived), lacking(config)):
        print(text)
    for text in [*warnings(config, derived), *endless(config)]:
        print(console.line("warning", text))


def start(config: RunConfig, derived: Derived, words: list[str]) -> int:
    """Runs the job to its end; its exit code. `words` make every rank compose the same configuration."""
    if config.role != "all":
        raise LaminarError(
            f"role={config.role}: laminar train starts all roles; one of them is started by "
            f"launch/{config.role}.sh RUN_DIR"
        )
    from laminar_hpc.machine.locks.run_lock import refuse_if_held

    output.keep_in(Path(config.run_dir))
    refuse_if_held(Path(config.run_dir))
    from laminar_hpc.controller.trajectories.rewards import check_rewards
    from laminar_hpc.data.pretrained import download_model
    from laminar_hpc.data.prompts import wrong_first_rows
    from laminar_hpc.launch import supervisor
    from laminar_hpc.machine.observability.prometheus import check_prometheus
    from laminar_hpc.machine.observability.wandb_mirror import check_wandb

    if supervisor.nothing_to_start(config):
        return 0
    lines = [*said(check_machine, config, derived), *said(check_devices, config, derived)]
    lines += [*said(check_wandb, config.observability.wandb), *said(check_prometheus, config)]
    lines += wrong_first_rows(config)
    if not lines:
        download_model(config, print)
        lines = lacking(config)
    if lines:
        raise Refused(dict.fromkeys([*lines, *of_inputs(config, lines)]))
    check_rewards(config)
    if config.rollout.scales:
        from laminar_hpc.launch import one_machine

        return one_machine.run(config, derived, words)
    return supervisor.run(config, words, derived.world_size)


def lacking(config: RunConfig) -> list[str]:
    """One line for each thing that the run needs and that is not there, or not readable."""
    from laminar_hpc.data.prompts import wrong_first_rows
    from laminar_hpc.data.tokens import stop_token_ids

    model = Path(config.model.path)
    there = (model / "tokenizer.json").is_file()  # else generation_config.json may not be there yet either
    stop = said(stop_token_ids, model) if there else []
    return [*missing_inputs(config), *stop, *wrong_first_rows(config)]


def say_lacking(config: RunConfig) -> None:
    """What a run would still need, on stderr: beside lines that are to be typed."""
    from laminar_hpc.machine.observability import console

    for text in lacking(config):
        print(console.line("before a run", text), file=sys.stderr, flush=True)


def check_devices(config: RunConfig, derived: Derived) -> None:
    """Raises LaminarError when the ranks do not fit this machine's GPUs or their memory."""
    from laminar_hpc.machine.devices import check_present, devices_of, present
    from laminar_hpc.machine.gpu_memory import check_gpus, gigabytes_of_gpus, host_memory_warning
    from laminar_hpc.machine.roles import assign_roles

    check_present(config)
    here = assign_roles(
        derived.trainer_ranks, derived.rollout_ranks, 1, derived.world_size, config.relay.lanes
    )
    for mine in here:
        devices_of(config, here, mine, len(present()))
    check_gpus(config, derived, here, gigabytes_of_gpus())
    if not present() and (warning := host_memory_warning(config, derived)):
        print(f"laminar: warning: {warning}", file=sys.stderr, flush=True)


def more_help() -> str:
    """Behind the examples of `laminar train --help`."""
    folder = conf_directory()
    return f"""\
settings: key=value, without dashes. Every key, its bounds and its default are in docs/configuration.md.
  text    stands as it is: data.train=/data/lr=1,b.jsonl; for a space quote the word: \
'data.train=my file.jsonl'
  list    'evaluation.files=[a.jsonl,b.jsonl]'
  table   rollout.engine_arguments.mem-fraction-static=0.3; ~rollout.engine_arguments.NAME takes one out

experiment={"|".join(group_names(folder / "experiment"))}   ({folder}/experiment)
pipeline={"|".join(group_names(folder / "pipeline"))}"""
