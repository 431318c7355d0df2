"""`laminar submit [OPTIONS] key=value ...`: checks a run as `laminar train` does, and submits its Slurm jobs.

Prints each sbatch line as it could be typed, then the jobs' ids and what to do next. With --dry-run only the
lines.
"""

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from laminar_hpc.config.check import Derived
from laminar_hpc.config.directories import shipped_directory
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.options import split, with_absolute_config_dir
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.slurm.ending import LEAD_SECONDS, lead_seconds
from laminar_hpc.launch.slurm.layout import SlurmJob, gpus_by_default, layout
from laminar_hpc.launch.slurm.patience import patience, slurm_configuration
from laminar_hpc.launch.slurm.scaling import ROLLOUTS, comment, scale_words
from laminar_hpc.machine.locks.run_lock import refuse_if_held
from laminar_hpc.machine.observability import console
from laminar_hpc.store import checkpoints

OURS = ("run_dir", "resume", "dry_run")  # settings that the scripts make themselves
_PARTS = {"controller": "control.sbatch", "trainer": "trainer.sbatch", "rollouts": ROLLOUTS}


def plan_words(value: str | None) -> list[str]:
    """The words for FILE = DIR/experiment/NAME.yaml, which `laminar plan` has written."""
    if value is None:
        return []
    file = Path(value).expanduser().absolute()
    if not value or not file.is_file() or file.suffix != ".yaml" or file.parent.name != "experiment":
        raise LaminarError(
            f"--plan={value}: not an experiment that `laminar plan` has written; it prints its name "
            "(DIR/experiment/NAME.yaml)"
        )
    return [f"--config-dir={file.parents[1]}", f"experiment={file.stem}"]


def checked_run(options: Namespace, words: Sequence[str]) -> tuple[RunConfig, Derived, list[str]]:
    """A run on several machines, and the settings for each of them. Raises LaminarError for what is refused.
    `options.dry_run` is then what the words say too."""
    from laminar_hpc.data.pretrained import pinned_words
    from laminar_hpc.launch.train_command import prepare

    loaded, config, derived = prepare([*words, *["dry_run=true"][: options.dry_run]], print)
    options.dry_run = config.dry_run
    settings = [word for word in words if word.partition("=")[0] not in OURS]
    return config, derived, [*with_absolute_config_dir(settings), *pinned_words(loaded, config)]


def main(options: Namespace) -> int:
    """Exit code 0 when all are submitted, or nothing is left to do. Raises LaminarError for what is refused,
    and where sbatch refuses one."""
    from laminar_hpc.launch.train_command import say_lacking

    words = [*plan_words(options.plan), *options.words]
    if not words:
        raise LaminarError("laminar submit needs what laminar train needs: laminar submit experiment=...")
    given = options.gpus_per_node
    if given is not None and not given.isdigit():
        raise LaminarError(f"--gpus-per-node={given}: a number of GPUs; 0 for a run on the CPU")
    every = split("--slurm", options.slurm)
    own = {name: split(f"--{part}", getattr(options, part)) for part, name in _PARTS.items()}
    config, derived, settings = checked_run(options, words)
    gpus = gpus_by_default(config) if given is None else int(given)
    jobs = layout(config, derived, gpus, options.apart, options.hetjob)
    if not options.dry_run and shutil.which("sbatch") is None:
        raise LaminarError(
            "there is no sbatch here; run this on a login node of the cluster, or add --dry-run"
        )
    if not options.dry_run and not look_around(config):
        return 0
    if len(jobs) > 1:
        settings += patience(config, words, slurm_configuration())
    run_dir = Path(config.run_dir).absolute()
    settings += scale_words(config, gpus, [*every, *own[ROLLOUTS]], settings)
    if config.rollout.scales and not options.hetjob:
        own[ROLLOUTS] = [*own[ROLLOUTS], comment(run_dir)]
    ids: list[str] = []
    for job in jobs:
        environment, command = command_of(job, run_dir, every, own, settings)
        variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        print(f"{variables} {shlex.join(command)}", flush=True)
        if not options.dry_run:
            ids.append(submitted(environment, command, ids))
    if options.dry_run:
        say_lacking(config)
    for text in [] if options.dry_run else next_steps(jobs, ids, run_dir):
        print(text)
    return 0


def look_around(config: RunConfig) -> bool:
    """Whether there is something to start on several machines. Raises LaminarError for what a run lacks, for
    a live run in its folder, and for an earlier one there unless it is to go on; fetches the model, which the
    machines may not be able to."""
    from laminar_hpc.controller.trajectories.rewards import check_rewards
    from laminar_hpc.data.pretrained import download_model
    from laminar_hpc.launch import supervisor
    from laminar_hpc.launch.train_command import lacking, of_inputs

    run_dir = Path(config.run_dir)
    refuse_if_held(run_dir)
    begun = (run_dir / "metrics.jsonl").exists() or bool(checkpoints.present(run_dir))
    if begun and config.resume != "auto":
        raise LaminarError(
            f"run_dir={run_dir} already has a run; add resume=auto to resume it, or choose another run_dir"
        )
    if supervisor.nothing_to_start(config):
        return False
    download_model(config, print)
    if lines := lacking(config):
        raise Refused(dict.fromkeys([*lines, *of_inputs(config, lines)]))
    check_rewards(config)
    return True


def command_of(
    job: SlurmJob,
    run_dir: Path,
    every: Sequence[str],
    own: Mapping[str, Sequence[str]],
    settings: Sequence[str],
) -> tuple[dict[str, str], list[str]]:
    """The variables and words of one sbatch, with options for `every` script and a script's `own`. A measured
    run is told of its end as early as it needs."""
    lead = lead_seconds(run_dir)
    early = [f"--signal=B:USR1@{lead:.0f}"] if lead > LEAD_SECONDS and "rollouts" not in job.script else []
    words = ["sbatch"]
    for number, part in enumerate(job.components or (job,)):
        words += [*[":"][:number], *part.options, *early, *every, *own.get(part.script, ())]
        early = []  # the first component is the one whose script is told
    environment = {
        "RUN_DIR": str(run_dir),
        "VENV": os.environ.get("VENV", sys.prefix),
        **dict(job.environment),
    }
    return environment, [*words, str(shipped_directory("slurm") / job.script), *settings]


def submitted(environment: dict[str, str], command: list[str], before: Sequence[str]) -> str:
    """The id of the job. Raises LaminarError with sbatch's words, and how to cancel those before it."""
    words = [command[0], "--parsable", *command[1:]]
    done = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        cancel = f"; cancel those before it: scancel {' '.join(before)}" if before else ""
        raise LaminarError(f"sbatch: {' '.join(done.stderr.split())}{cancel}")
    return done.stdout.strip().partition(";")[0]  # behind a semicolon: the cluster's name


def next_steps(jobs: Sequence[SlurmJob], ids: Sequence[str], run_dir: Path) -> list[str]:
    """What the user may want to type next."""
    folder = shlex.quote(str(run_dir))
    lines = [
        console.line("submitted", f"job {number}  {job.script.removesuffix('.sbatch')}")
        for job, number in zip(jobs, ids, strict=True)
    ]
    lines += [
        console.line("watch", f"laminar top {folder}"),
        console.line(
            "stop",
            f"laminar stop {folder}   (a checkpoint, then all jobs end; the same command with "
            "resume=auto goes on)",
        ),
        console.line("cancel", f"scancel {' '.join(ids)}"),
    ]
    if len(jobs) > 1 and jobs[-1].script == ROLLOUTS:
        lines.append(console.line("more", "the last sbatch line again, with another --array"))
    return lines
