"""`laminar`: the command line. COMMANDS is the table of what there is; the part that an entry names does the
work.

Parts are imported when they are called: a refusal, or `--help`, need not wait for the others.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError, did_you_mean, of_the_system, print_lines
from laminar_hpc.launch.command import CONFIG_DIR, KEYS, PLAN, Subcommand, elsewhere, flag, several, value
from laminar_hpc.machine.observability.output import guard

if TYPE_CHECKING:
    from argparse import Namespace

CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def stop(options: "Namespace") -> int:
    """`laminar stop RUN_DIR`; returns the exit code. Raises LaminarError where no job runs."""
    from laminar_hpc.line.stop import request_stop

    guard()  # a terminal that is gone does not fail it
    run_dir, wish = options.words[0], "to finish its step, checkpoint and leave"
    if request_stop(Path(run_dir), "laminar stop"):  # launch/slurm/ending.py knows it by this reason
        print(f"asked the job in {run_dir} {wish}")
    else:
        text = "has no controller now: the request waits there for the next one, which has it"
        print(f"the job in {run_dir} {text} {wish}; start a controller with resume=auto")
    return 0


COMMANDS: dict[str, Subcommand] = {
    "train": Subcommand(
        elsewhere("launch.train_command"),
        "check, then run the job on this machine and watch over it (all roles in one world)",
        {
            "laminar train experiment=demo": "a small model learns sums on two CPU cores",
            "laminar train experiment=demo steps=20 dry_run=true": "what would start, and whether it fits",
            "laminar train experiment=demo resume=auto": "go on from the newest checkpoint",
            "laminar train --multirun experiment=demo seed=1,2": "two runs, and a table of both",
            "laminar train experiment=one_gpu data.train=prompts.jsonl reward.function=my_rewards.score": "",
        },
        (),
        {
            "--config-dir -cd": CONFIG_DIR,
            "--cfg -c": value("job|hydra|all", "print the composed configuration and stop", choices=CFG),
            "--info -i": value("WHAT", f"where it comes from: {', '.join(INFO)}", "all", choices=INFO),
            "--multirun -m": flag(
                "a run for each combination of seed=1,2 'steps=range(1,4)' pipeline=glob(*)"
            ),
            "--slurm": value("OPTIONS", "with --multirun: a Slurm job for each; OPTIONS are sbatch's", ""),
        },
        KEYS,
        help=elsewhere("launch.train_command", "more_help"),
    ),
    "init": Subcommand(
        elsewhere("launch.project"),
        "a small project of your own: data, reward, experiment, a Slurm script",
        {"laminar init mine": "the folder mine/, with a README.md that goes on from there"},
        ("DIR",),
    ),
    "stop": Subcommand(
        stop,
        "let a running job finish its step, write a checkpoint and exit 0",
        {"laminar stop runs/demo": "as Ctrl-C in its terminal, from any machine that sees the folder"},
        ("RUN_DIR",),
    ),
    "submit": Subcommand(
        elsewhere("launch.slurm.submit"),
        "check, then submit the run's Slurm jobs: trainers, controller, an array of rollouts",
        {
            "laminar submit experiment=cluster_64gpu_32b data.train=FILE reward.function=NAME": "",
            "laminar submit experiment=mine --slurm='--account=me --time=12:00:00'": "options for all jobs",
            "laminar submit experiment=mine --rollouts='--partition=preempt'": "for one of them",
            "laminar submit --plan DIR/experiment/NAME.yaml data.train=FILE": "what laminar plan has written",
        },
        (),
        {
            "--dry-run": flag("print the sbatch lines, submit nothing"),
            "--apart": flag("a job for each role, although one node would do"),
            "--hetjob": flag("one heterogeneous job of all roles"),
            "--plan": PLAN,
            "--gpus-per-node": value("N", "GPUs of each node; 0 = run on the CPU"),
            "--slurm": several("OPTIONS", "of sbatch, for all jobs"),
            "--controller": several("OPTIONS", "of sbatch, for the controller's job"),
            "--trainer": several("OPTIONS", "of sbatch, for the trainers' job"),
            "--rollouts": several("OPTIONS", "of sbatch, for the rollouts' jobs"),
            "--config-dir -cd": CONFIG_DIR,
        },
        KEYS,
    ),
    "launch": Subcommand(
        elsewhere("launch.ssh.launch"),
        "check, then run the job on several machines over ssh, without Slurm, and show its progress here",
        {
            "laminar launch --hosts hosts.txt experiment=mine": "hosts.txt: a line for each, NAME [gpus=N]",
            "laminar launch --hosts hosts.txt experiment=mine --only node3": "start one that was lost again",
        },
        (),
        {
            "--hosts": value("FILE", "a line for each machine: NAME [gpus=N]"),
            "--dry-run": flag("print the ssh lines, start nothing"),
            "--tied": flag("the machines stop the run when this command, or its connection, has ended"),
            "--only": several("NAMES", "start only these machines, as n1,n2"),
            "--ssh": several("OPTIONS", "of ssh"),
            "--plan": PLAN,
            "--config-dir -cd": CONFIG_DIR,
        },
        KEYS,
    ),
    "join": Subcommand(
        elsewhere("launch.join"),
        "add rollouts on this machine to a run with cluster.storage=stream; no shared folder is needed",
        {
            "laminar join 10.0.0.1:40123 --key join.key": "with a copy of the run's RUN_DIR/join.key",
            "laminar join 10.0.0.1:40123 --key join.key --replicas 4": "on four of its GPUs",
            "laminar join 10.0.0.1:40123 --key join.key model.path=/models/a": "the model is here already",
        },
        (),
        {
            "--key": value("FILE", "the run's key, mode 0600; - = the first line of the standard input"),
            "--replicas": value("N", "rollouts to start here (1)", default="1"),
            "--tied": flag("with --key -: leave the run when the standard input ends"),
        },
        f"[HOST:PORT] {KEYS}",
    ),
    "slurm": Subcommand(
        elsewhere("launch.slurm.check"),
        "look at all nodes of a Slurm allocation: network, clocks, limits, versions, GPUs, shared storage",
        {
            "laminar slurm check": "inside salloc or sbatch; exit code 1 if a row says FAIL",
            "laminar slurm check /shared/runs": "with this folder as the one that all nodes share",
        },
        ("check",),
        more="[FOLDER]",
    ),
    "top": Subcommand(
        elsewhere("report.top"),
        "a run as it goes: ranks, weights, KV cache, queues, staleness, tokens per second",
        {"laminar top runs/demo": "once a second, until Ctrl-C; the run goes on"},
        ("RUN_DIR",),
        {"--once": flag("one frame; exit code 1 if the run died")},
    ),
    "logs": Subcommand(
        elsewhere("report.logs"),
        "the end of the log of one of a run's processes, also on a machine that has joined it",
        {
            "laminar logs runs/demo": "which there are",
            "laminar logs runs/demo rollout-3": "of that rollout; engine-3 is its engine's",
        },
        ("RUN_DIR",),
        {"--lines": value("N", "as many of its last lines (100), of at most 1 MiB", default="100")},
        "[NAME]",
    ),
    "report": Subcommand(
        elsewhere("report.document"),
        "write summary.json and report.html again",
        {"laminar report runs/demo": "of a run that goes on, has ended or died"},
        ("RUN_DIR",),
    ),
    "audit": Subcommand(
        elsewhere("store.audit.command"),
        "prove from a run's records that nothing was lost or trained twice",
        {"laminar audit runs/demo": "exit code 0 = clean, 1 = culprits, which are named, 2 = no run"},
        ("RUN_DIR",),
        {"--json": value("PATH", "write the same as a file")},
    ),
    "export": Subcommand(
        elsewhere("report.export.command"),
        "write a run's scored trajectories into one file, or its model with the adapter merged into it",
        {
            "laminar export runs/demo --out demo.jsonl": "a line each: prompt, response, reward, step, ...",
            "laminar export runs/demo --steps 1:20 --out demo.parquet --format parquet": "of steps 1 to 20",
            "laminar export runs/lora --merged models/mine": "a Hugging Face directory of the whole model",
        },
        ("RUN_DIR",),
        {
            "--format": value("jsonl|parquet", "by default as the file is called"),
            "--steps": value("A:B", "the first step and the last", default=":"),
            "--out": value("PATH", "the file to write"),
            "--merged": value("DIR", "write the model with the newest checkpoint's adapter in its weights"),
        },
    ),
    "sim": Subcommand(
        elsewhere("simulator.command"),
        "simulate pipelines and scales; needs no GPU",
        {
            "laminar sim small": "five pipelines on 16 and 32 GPUs, in half a minute",
            "laminar sim dora": "the pipelines of DORA's table at 64 and 128 GPUs, in some minutes",
            "laminar sim laminar 'gpus=[64,256]' model=7B rollout_mtbf_hours=50": "scales, with failures",
            "laminar sim laminar workload.lengths_file=runs/demo": "the lengths of a run's own store",
            "laminar sim repack --without repack,relays": "what each of these is worth, and both",
            "laminar sim runs/demo --as verl,areal": "the same trajectories under other pipelines",
            "laminar sim runs/demo": "that run predicted from its own measurements, and what would help most",
        },
        ("EXPERIMENT|RUN_DIR",),
        {
            "--without": several("NAMES", "beside the whole: without repack, relays, own_pace, ..."),
            "--staleness": value("BOUNDS", "the run at each bound, as 0,1,2,4,8"),
            "--as": value("PIPELINES", "a run's trajectories under others: verl, areal, one_step, sync, ..."),
            "--json": flag("print the result as JSON"),
            "--config-dir -cd": CONFIG_DIR,
        },
        KEYS,
        elsewhere("simulator.settings", "experiments"),
        lambda: elsewhere("simulator.settings", "help_of")("sim"),
    ),
    "plan": Subcommand(
        elsewhere("simulator.plan_command"),
        "divide a cluster between trainer, relays and rollouts",
        {
            "laminar plan node": "one machine of 8 GPUs: how many train, how many generate?",
            "laminar plan mixed 'pools=[{gpu: H100, count: 16}, {gpu: H20, count: 32}]'": "who trains?",
            "laminar plan runs/demo": "settings with which that run would have been faster on the same GPUs",
        },
        ("QUESTION|RUN_DIR",),
        {"--json": flag("print the plan as JSON"), "--config-dir -cd": CONFIG_DIR},
        KEYS,
        elsewhere("simulator.settings", "questions"),
        lambda: elsewhere("simulator.settings", "help_of")("plan"),
    ),
    "doctor": Subcommand(
        elsewhere("launch.doctor.command"),
        "what this machine can run, and what killed runs have left on it, which --clean removes",
        {"laminar doctor": "one line for each thing that a run needs; exit code 1 if one fails"},
        options={"--clean": flag("remove what killed runs have left here")},
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
    from laminar_hpc.launch import completion

    if name == "--complete" and arguments:
        print("\n".join(completion.candidates(arguments[0], COMMANDS)))
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
    return command.run(command.parse(name, arguments))


if __name__ == "__main__":
    main()
