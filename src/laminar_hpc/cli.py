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
from laminar_hpc.config.errors import LaminarError, Refused, did_you_mean, of_the_system, print_lines
from laminar_hpc.observability.output import guard

WIDE = 60  # columns of an example; what a longer one does follows right behind it
_RUN = "RUN_DIR is a finished run, which takes no keys."


def train_help() -> str:
    """What `laminar train --help` adds to its usage."""
    from laminar_hpc.train_command import more_help

    return more_help()


def stop(arguments: list[str]) -> int:
    """`laminar stop RUN_DIR`; returns the exit code. Raises LaminarError where no job runs."""
    from laminar_hpc.cluster.stop import request_stop

    guard()  # a terminal that is gone does not fail it
    run_dir, wish = arguments[0], "to finish its step, checkpoint and leave"
    if request_stop(Path(run_dir), "laminar stop"):  # jobs/ending.py knows it by this reason
        print(f"asked the job in {run_dir} {wish}")
    else:
        text = "has no controller now: the request waits there for the next one, which has it"
        print(f"the job in {run_dir} {text} {wish}; start a controller with resume=auto")
    return 0


def sim_help() -> str:
    """What `laminar sim --help` adds to its usage."""
    from laminar_hpc.simulator.schema import SimulationConfig
    from laminar_hpc.simulator.settings import experiments, key_names

    names = f"EXPERIMENT is one of {', '.join(experiments())}. {_RUN}"
    return f"\n{names}\nkeys: {key_names(SimulationConfig)}"


def plan_help() -> str:
    """What `laminar plan --help` adds to its usage."""
    from laminar_hpc.simulator.schema import PlanConfig
    from laminar_hpc.simulator.settings import key_names, questions

    names = f"QUESTION is one of {', '.join(questions())}. {_RUN}"
    return f"\n{names}\nkeys: {key_names(PlanConfig)}"


# those of jobs/submit.py, which is imported only when it is called
submit_options = (
    "--dry-run",
    "--apart",
    "--hetjob",
    "--plan FILE",
    "--gpus-per-node N",
    "--slurm OPTIONS",
    "--controller OPTIONS",
    "--trainer OPTIONS",
    "--rollouts OPTIONS",
    "--config-dir DIR",
)


def elsewhere(module: str) -> Callable[[list[str]], int]:
    """The command whose `main` is in `module`, which is imported only when the command is called."""
    return lambda arguments: importlib.import_module(module).main(arguments)


@dataclass(frozen=True)
class Command:
    """A row of COMMANDS."""

    run: Callable[[list[str]], int]  # takes the words behind the command, returns the exit code
    about: str
    examples: dict[str, str]  # a command line -> what it does
    places: tuple[str, ...] = ()  # the words that it needs
    options: tuple[str, ...] = ()  # "--once", or with a value "--config-dir DIR"
    keys: bool = False  # words may follow; whoever reads them refuses what is not one
    words: str = "[key=value ...]"  # what these are
    help: Callable[[], str] = str

    def page(self, name: str) -> str:
        """What `--help` prints."""
        width = min(WIDE, max(map(len, self.examples)))
        lines = [f"  {words:<{width}}  {text}".rstrip() for words, text in self.examples.items()]
        parts = [f"usage: {self.usage(name)}", "", self.about, "", "examples", *lines, self.help()]
        return "\n".join(parts).rstrip()

    def usage(self, name: str, options_max: int = 9) -> str:
        keys = [self.words] if self.keys else []
        options = [f"[{option}]" for option in self.options]
        options = options if len(options) <= options_max else ["[OPTION ...]"]
        return " ".join(["laminar", name, *self.places, *keys, *options])


COMMANDS: dict[str, Command] = {
    "train": Command(
        elsewhere("laminar_hpc.train_command"),
        "check, then run the job on this machine and watch over it (a torchrun of all roles)",
        {
            "laminar train experiment=demo": "a small model learns sums on two CPU cores",
            "laminar train experiment=demo steps=20 dry_run=true": "what would start, and whether it fits",
            "laminar train experiment=demo resume=auto": "go on from the newest checkpoint",
            "laminar train experiment=demo --cfg job": "print the configuration and stop",
            "laminar train --multirun experiment=demo seed=1,2": "two runs, and a table of both",
            "laminar train --config-dir conf experiment=mine": "a file of your own folder",
            "laminar train experiment=one_gpu data.train=prompts.jsonl reward.function=my_rewards.score": "",
        },
        options=("--config-dir DIR", "--cfg job|hydra|all", "--info", "--multirun", "--slurm"),
        keys=True,
        help=train_help,
    ),
    "init": Command(
        elsewhere("laminar_hpc.project"),
        "a small project of your own: data, reward, experiment, a Slurm script",
        {"laminar init mine": "the folder mine/, with a README.md that goes on from there"},
        ("DIR",),
    ),
    "stop": Command(
        stop,
        "let a running job finish its step, write a checkpoint and exit 0",
        {"laminar stop runs/demo": "as Ctrl-C in its terminal, from any machine that sees the folder"},
        ("RUN_DIR",),
    ),
    "submit": Command(
        elsewhere("laminar_hpc.jobs.submit"),
        "check, then submit the run's Slurm jobs: trainers, controller, an array of rollouts",
        {
            "laminar submit experiment=cluster_64gpu_32b data.train=FILE reward.function=NAME": "",
            "laminar submit experiment=demo --apart --dry-run": "print the sbatch lines, submit nothing",
            "laminar submit experiment=mine --slurm='--account=me --time=12:00:00'": "options for all jobs",
            "laminar submit experiment=mine --rollouts='--partition=preempt'": "for one of them",
            "laminar submit --plan DIR/experiment/NAME.yaml data.train=FILE": "what laminar plan has written",
        },
        options=submit_options,
        keys=True,
    ),
    "launch": Command(
        elsewhere("laminar_hpc.jobs.launch"),
        "check, then run the job on several machines over ssh, without Slurm, and show its progress here",
        {
            "laminar launch --hosts hosts.txt experiment=mine": "hosts.txt: a line for each, NAME [gpus=N]",
            "laminar launch --hosts hosts.txt experiment=mine --dry-run": "print the ssh lines",
            "laminar launch --hosts hosts.txt experiment=mine --only node3": "start one that was lost again",
        },
        options=(
            "--hosts FILE",
            "--dry-run",
            "--tied",
            "--only NAMES",
            "--ssh OPTIONS",
            "--plan FILE",
            "--config-dir DIR",
        ),
        keys=True,
    ),
    "slurm": Command(
        elsewhere("laminar_hpc.jobs.check"),
        "look at all nodes of a Slurm allocation: network, clocks, limits, versions, GPUs, shared storage",
        {
            "laminar slurm check": "inside salloc or sbatch; exit code 1 if a row says FAIL",
            "laminar slurm check /shared/runs": "with this folder as the one that all nodes share",
        },
        ("check",),
        keys=True,
        words="[FOLDER]",
    ),
    "top": Command(
        elsewhere("laminar_hpc.report.top"),
        "a run as it goes: ranks, weights, KV cache, queues, staleness, tokens per second",
        {
            "laminar top runs/demo": "once a second, until Ctrl-C; the run goes on",
            "laminar top runs/demo --once": "one frame; exit code 1 if the run died",
        },
        ("RUN_DIR",),
        ("--once",),
    ),
    "report": Command(
        elsewhere("laminar_hpc.report.document"),
        "write summary.json and report.html again",
        {"laminar report runs/demo": "of a run that goes on, has ended or died"},
        ("RUN_DIR",),
    ),
    "audit": Command(
        elsewhere("laminar_hpc.audit.command"),
        "prove from a run's records that nothing was lost or trained twice",
        {
            "laminar audit runs/demo": "exit code 0 = clean, 1 = culprits, which are named, 2 = no run",
            "laminar audit runs/demo --json audit.json": "the same as a file",
        },
        ("RUN_DIR",),
        ("--json PATH",),
    ),
    "export": Command(
        elsewhere("laminar_hpc.export.command"),
        "write a run's scored trajectories into one file, for pandas, datasets or other tools",
        {
            "laminar export runs/demo --out demo.jsonl": "a line each: prompt, response, reward, step, ...",
            "laminar export runs/demo --steps 1:20 --out demo.parquet --format parquet": "of steps 1 to 20",
        },
        ("RUN_DIR",),
        ("--format jsonl|parquet", "--steps A:B", "--out PATH"),
    ),
    "sim": Command(
        elsewhere("laminar_hpc.simulator.command"),
        "simulate pipelines and scales; needs no GPU",
        {
            "laminar sim small": "five pipelines on 16 and 32 GPUs, in half a minute",
            "laminar sim dora": "the pipelines of DORA's table at 64 and 128 GPUs, in some minutes",
            "laminar sim laminar 'gpus=[64,256]' model=7B rollout_mtbf_hours=50": "scales, with failures",
            "laminar sim laminar workload.lengths_file=runs/demo": "the lengths of a run's own store",
            "laminar sim runs/demo": "that run predicted from its own measurements, and what would help most",
        },
        ("EXPERIMENT|RUN_DIR",),
        ("--json", "--config-dir DIR"),
        keys=True,
        help=sim_help,
    ),
    "plan": Command(
        elsewhere("laminar_hpc.simulator.plan_command"),
        "divide a cluster between trainer, relays and rollouts",
        {
            "laminar plan node": "one machine of 8 GPUs: how many train, how many generate?",
            "laminar plan mixed 'pools=[{gpu: H100, count: 16}, {gpu: H20, count: 32}]'": "who trains?",
            "laminar plan runs/demo": "settings with which that run would have been faster on the same GPUs",
        },
        ("QUESTION|RUN_DIR",),
        ("--json", "--config-dir DIR"),
        keys=True,
        help=plan_help,
    ),
    "doctor": Command(
        elsewhere("laminar_hpc.doctor.command"),
        "what this machine can run, and what killed runs have left on it, which --clean removes",
        {
            "laminar doctor": "one line for each thing that a run needs; exit code 1 if one fails",
            "laminar doctor --clean": "remove what killed runs have left in shared memory",
        },
        options=("--clean",),
    ),
}


def overview() -> str:
    """The text of `laminar --help`: one line per command."""
    lines = [f"  {command.usage(name, 1):<60} {command.about}" for name, command in COMMANDS.items()]
    more = (
        "laminar COMMAND --help says more; laminar --version. A first run: laminar train experiment=demo",
        'Completion in bash: eval "$(laminar --completion bash)"',
    )
    return "\n".join(["usage: laminar COMMAND ...", "", *lines, "", *more])


def check_words(name: str, words: list[str]) -> None:
    """Raises Refused for options that a command does not have, and for too few or too many words."""
    command, lines, given = COMMANDS[name], [], []
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
            given.append(word)
    if not command.keys and len(given) < len(command.places):
        lines.append(f"laminar {name} needs {' '.join(command.places[len(given) :])}")
    if not command.keys and len(given) > len(command.places):
        lines.append(
            f"{' '.join(given[len(command.places) :])}: one word too many; quote a name that has spaces"
        )
    if lines:
        raise Refused(f"{line}; usage: {command.usage(name)}" for line in lines)


def main() -> None:
    """Exit codes: 0 = done or stopped in order, 1 = the job failed, 2 = refused before it began."""
    if sys.argv[1:2] != ["top"]:  # which colours its own text, and escapes what it shows
        guard(lossless=True)
    try:
        sys.exit(run(sys.argv[1:]))
    except LaminarError as error:
        print_lines(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except OSError as error:
        print_lines(of_the_system(error))
        sys.exit(2)


def complete(name: str, arguments: list[str]) -> int:
    """`--completion bash` prints the script for bash, which asks with `--complete LINE`."""
    from laminar_hpc import completion

    if name == "--complete" and arguments:
        options = {name: [option.partition(" ")[0] for option in COMMANDS[name].options] for name in COMMANDS}
        print("\n".join(completion.candidates(arguments[0], options)))
    else:
        flag, _, shell = name.partition("=")
        if flag != "--completion":
            raise LaminarError(f"laminar {flag}: no such option; write laminar --completion bash")
        print(completion.script(shell or (arguments or ["bash"])[0]))
    return 0


def run(words: list[str]) -> int:
    """The exit code of one command line. Raises LaminarError for what cannot begin."""
    if not words:
        print(overview(), file=sys.stderr)
        return 2
    name, arguments = words[0], words[1:]
    if name in ("-V", "--version", "version"):
        print(f"laminar {__version__}")
        return 0
    if name.startswith("--complet"):
        return complete(name, arguments)
    asks = [word for word in words if word in ("-h", "--help")]
    if name == "help" or (asks and name not in COMMANDS):
        name, asks = (arguments or [""])[0], ["help"]
        if name not in COMMANDS:
            print(overview())
            return 0
    if name not in COMMANDS:
        if "=" in name:
            raise LaminarError(f"{name}: write laminar train {name}")
        near = did_you_mean(name, [*COMMANDS, "help"])
        raise LaminarError(f"laminar {name}: no such command{near}; use one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    if asks:
        print(command.page(name))
        return 0
    check_words(name, arguments)
    return command.run(arguments)


if __name__ == "__main__":
    main()
