"""`laminar`: the command line. Thin: each command checks its words and calls the part that does the work.

laminar train [key=value ...] [--config-dir DIR] check, then run the job on this machine (a torchrun of all
roles) and watch over it laminar stop RUN_DIR let a running job finish its step, checkpoint and exit 0 laminar
top RUN_DIR [--once] a run as it goes: ranks, weights, KV cache, queues, staleness, tokens per second laminar
report RUN_DIR write summary.json and report.html again laminar sim EXPERIMENT [key=value ...] [--json]
simulate pipelines and scales; no GPU needed laminar plan QUESTION [key=value ...] [--json] divide a cluster
between trainer, relays and rollouts laminar doctor what this machine can run
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.cluster.devices import devices_of, present
from laminar_hpc.cluster.gpu_memory import check_dry_run, check_gpus, gigabytes_of_gpus, host_memory_warning
from laminar_hpc.cluster.launch import run_torchrun
from laminar_hpc.cluster.roles import assign_roles
from laminar_hpc.cluster.stop import request_stop
from laminar_hpc.config.check import check, check_machine, derived_values, missing_inputs
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config, with_absolute_config_dir
from laminar_hpc.observability import console
from laminar_hpc.observability.wandb_mirror import check_wandb


def train(arguments: list[str]) -> int:
    config = load_config(arguments)
    derived = check(config)
    if config.dry_run:
        check_dry_run(config, derived)
        for text in console.dry_run_lines(derived_values(config, derived), missing_inputs(config)):
            print(text)
        return 0
    check_machine(config, derived)
    check_wandb(config.observability.wandb)
    if config.role != "all":
        raise LaminarError(
            "laminar train starts all roles; for one role use torchrun -m laminar_hpc role=..., as the scripts in launch/ do"
        )
    here = assign_roles(derived.trainer_ranks, derived.rollout_ranks, 1, derived.world_size, config.relay.lanes)
    for mine in here:
        devices_of(config, here, mine, len(present()))
    check_gpus(config, derived, here, gigabytes_of_gpus())
    if not present() and (warning := host_memory_warning(config, derived)):
        print(f"laminar: warning: {warning}", file=sys.stderr, flush=True)
    return run_torchrun(config, with_absolute_config_dir(arguments), derived.world_size)


def stop(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise LaminarError("usage: laminar stop RUN_DIR")
    request_stop(Path(arguments[0]), "laminar stop")
    print(f"asked the job in {arguments[0]} to finish its step, checkpoint and leave")
    return 0


def elsewhere(module: str) -> Callable[[list[str]], int]:
    return lambda arguments: importlib.import_module(module).main(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "stop": stop,
    "top": elsewhere("laminar_hpc.observability.top"),
    "report": elsewhere("laminar_hpc.observability.report"),
    "sim": elsewhere("laminar_hpc.simulator.command"),
    "plan": elsewhere("laminar_hpc.simulator.plan_command"),
    "doctor": elsewhere("laminar_hpc.doctor"),
}


def main() -> None:
    """Exit codes: 0 = done or stopped in order, 1 = the job failed, 2 = refused before it began."""
    words = sys.argv[1:]
    if not words or words[0] not in COMMANDS:
        asked = words and words[0] in ("-h", "--help", "help")
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    try:
        sys.exit(COMMANDS[words[0]](words[1:]))
    except LaminarError as error:
        print(f"laminar: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)


if __name__ == "__main__":
    main()
