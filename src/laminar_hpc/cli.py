"""`laminar`: the command line. COMMANDS is the table of what there is; each entry checks its words and calls
the part that does the work.

Parts are imported when they are called: a refusal, or `--help`, need not wait for the others.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError, Refused, did_you_mean


def train(arguments: list[str]) -> int:
    """Refuses, or shows, or starts what the words ask for."""
    if not arguments:
        raise LaminarError(
            "laminar train needs a model, prompts and a reward: try `laminar train experiment=demo`, or name "
            "your own "
            "with model.path=DIR data.train=FILE reward.function=MODULE.NAME; `laminar train --help` shows "
            "more"
        )
    from laminar_hpc.config.check import check, check_machine, derived_values, missing_inputs, warnings
    from laminar_hpc.config.load import load_config, with_absolute_config_dir

    config = load_config(arguments)
    derived = check(config)

    from laminar_hpc.controller.rewards import check_rewards
    from laminar_hpc.controller.rows import wrong_first_rows
    from laminar_hpc.emulation.constants import unknown_constants
    from laminar_hpc.observability import console
    from laminar_hpc.observability.wandb_mirror import check_wandb
    from laminar_hpc.rollout.engine_arguments import unknown_arguments
    from laminar_hpc.supervisor import nothing_to_start
    from laminar_hpc.supervisor import run as run_job

    if lines := [*unknown_arguments(config), *unknown_constants(config)]:
        raise Refused(lines)
    lacking = [*missing_inputs(config), *wrong_first_rows(config)]
    from laminar_hpc.cluster.gpu_memory import check_dry_run, check_gpus, gigabytes_of_gpus, host_memory_warning

    if config.dry_run:
        check_dry_run(config, derived)
        check_rewards(config)
        for text in console.dry_run_lines(derived_values(config, derived), lacking):
            print(text)
        for text in warnings(config, derived):
            print(console.line("warning", text))
        return 0
    if nothing_to_start(config):
        return 0
    if config.role != "all":
        raise LaminarError(
            "laminar train starts all roles; for one role use torchrun -m laminar_hpc role=..., as the scripts in launch/ do"
        )
    if lacking:
        raise Refused(lacking)
    check_machine(config, derived)
    check_wandb(config.observability.wandb)
    check_rewards(config)

    from laminar_hpc.cluster.devices import devices_of, present
    from laminar_hpc.cluster.roles import assign_roles

    here = assign_roles(derived.trainer_ranks, derived.rollout_ranks, 1, derived.world_size, config.relay.lanes)
    for mine in here:
        devices_of(config, here, mine, len(present()))
    check_gpus(config, derived, here, gigabytes_of_gpus())
    if not present() and (warning := host_memory_warning(config, derived)):
        print(f"laminar: warning: {warning}", file=sys.stderr, flush=True)
    return run_job(config, with_absolute_config_dir(arguments), derived.world_size)


def train_help() -> str:
    from laminar_hpc.config.load import conf_directory, group_names

    folder = conf_directory()
    return f"""
examples
  laminar train experiment=demo                        a small model learns sums on two CPU cores
  laminar train experiment=demo steps=20 dry_run=true  what would start, and whether it fits
  laminar train experiment=demo resume=auto            go on from the newest checkpoint
  laminar train model.path=models/Qwen2.5-0.5B data.train=prompts.jsonl reward.function=my_rewards.score

your own experiments: laminar train --config-dir conf experiment=NAME reads conf/experiment/NAME.yaml

settings: key=value, without dashes. Every key, its bounds and its default are in docs/configuration.md.
  text    stands as it is: data.train=/data/lr=1,b.jsonl; for a space quote the word: 'data.train=my file.jsonl'
  list    'evaluation.files=[a.jsonl,b.jsonl]'
  table   rollout.engine_arguments.mem-fraction-static=0.3

experiment={"|".join(group_names(folder / "experiment"))}   ({folder}/experiment)
pipeline={"|".join(group_names(folder / "pipeline"))}"""


def stop(arguments: list[str]) -> int:
    from laminar_hpc.cluster.stop import request_stop

    request_stop(Path(arguments[0]), "laminar stop")
    print(f"asked the job in {arguments[0]} to finish its step, checkpoint and leave")
    return 0


def sim_help() -> str:
    from laminar_hpc.simulator.load import experiments

    return f"\nEXPERIMENT is one of {', '.join(experiments())}. The keys are in src/laminar_hpc/simulator/schema.py."


def plan_help() -> str:
    from laminar_hpc.simulator.load import questions

    return f"\nQUESTION is one of {', '.join(questions())}. The keys are in src/laminar_hpc/simulator/schema.py."


def elsewhere(module: str) -> Callable[[list[str]], int]:
    return lambda arguments: importlib.import_module(module).main(arguments)


@dataclass(frozen=True)
class Command:
    run: Callable[[list[str]], int]  # takes the words behind the command, returns the exit code
    about: str
    places: tuple[str, ...] = ()  # the words that it needs
    options: tuple[str, ...] = ()  # "--once", or with a value "--config-dir DIR"
    keys: bool = False  # key=value words may follow; whoever reads them refuses what is not one
    help: Callable[[], str] = str

    def usage(self, name: str) -> str:
        keys = ["[key=value ...]"] if self.keys else []
        return " ".join(["laminar", name, *self.places, *keys, *(f"[{option}]" for option in self.options)])


COMMANDS: dict[str, Command] = {
    "train": Command(
        train,
        "check, then run the job on this machine and watch over it (a torchrun of all roles)",
        options=("--config-dir DIR",),
        keys=True,
        help=train_help,
    ),
    "stop": Command(stop, "let a running job finish its step, write a checkpoint and exit 0", ("RUN_DIR",)),
    "top": Command(
        elsewhere("laminar_hpc.observability.top"),
        "a run as it goes: ranks, weights, KV cache, queues, staleness, tokens per second",
        ("RUN_DIR",),
        ("--once",),
    ),
    "report": Command(
        elsewhere("laminar_hpc.observability.report"),
        "write summary.json and report.html again",
        ("RUN_DIR",),
    ),
    "sim": Command(
        elsewhere("laminar_hpc.simulator.command"),
        "simulate pipelines and scales; needs no GPU",
        ("EXPERIMENT",),
        ("--json",),
        keys=True,
        help=sim_help,
    ),
    "plan": Command(
        elsewhere("laminar_hpc.simulator.plan_command"),
        "divide a cluster between trainer, relays and rollouts",
        ("QUESTION",),
        ("--json",),
        keys=True,
        help=plan_help,
    ),
    "doctor": Command(
        elsewhere("laminar_hpc.doctor"),
        "what this machine can run, and what killed runs have left on it, which --clean removes",
        options=("--clean",),
    ),
}


def overview() -> str:
    lines = [f"  {command.usage(name):<52} {command.about}" for name, command in COMMANDS.items()]
    more = "laminar COMMAND --help says more; laminar --version. A first run: laminar train experiment=demo"
    return "\n".join(["usage: laminar COMMAND ...", "", *lines, "", more])


def check_words(name: str, words: list[str]) -> None:
    """Raises Refused for options that a command does not have, and for too few or too many words."""
    command, lines, found = COMMANDS[name], [], []
    options = {option.partition(" ")[0]: " " in option for option in command.options}
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag in options:
            if options[flag] and not equals and next(rest, None) is None:
                lines.append(f"{word} needs a value")
        elif word.startswith("-") and not command.keys:
            lines.append(f"{word}: no such option{did_you_mean(flag, options)}")
        else:
            found.append(word)
    if not command.keys and len(found) < len(command.places):
        lines.append(f"laminar {name} needs {' '.join(command.places[len(found) :])}")
    if not command.keys and len(found) > len(command.places):
        lines.append(f"{' '.join(found[len(command.places) :])}: one word too many; quote a name that has spaces")
    if lines:
        raise Refused(f"{line}; usage: {command.usage(name)}" for line in lines)


def main() -> None:
    """Exit codes: 0 = done or stopped in order, 1 = the job failed, 2 = refused before it began."""
    try:
        sys.exit(run(sys.argv[1:]))
    except LaminarError as error:
        for line in str(error).splitlines():
            print(f"laminar: error: {line}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)


def run(words: list[str]) -> int:
    """The exit code of one command line. Raises LaminarError for what cannot begin."""
    if not words:
        print(overview(), file=sys.stderr)
        return 2
    name, arguments = words[0], words[1:]
    if name in ("-V", "--version", "version"):
        print(f"laminar {__version__}")
        return 0
    asks = [word for word in words if word in ("-h", "--help")]
    if name == "help" or (asks and name not in COMMANDS):
        name, asks = (arguments or [""])[0], ["help"]
        if name not in COMMANDS:
            print(overview())
            return 0
    if name not in COMMANDS:
        if "=" in name:
            raise LaminarError(f"{name}: write laminar train {name}")
        raise LaminarError(f"laminar {name}: no such command{did_you_mean(name, COMMANDS)}; use one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    if asks:
        print(f"usage: {command.usage(name)}\n\n{command.about}\n{command.help()}".rstrip())
        return 0
    check_words(name, arguments)
    return command.run(arguments)


if __name__ == "__main__":
    main()
