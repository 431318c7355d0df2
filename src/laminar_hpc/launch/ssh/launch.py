"""`laminar launch --hosts FILE [OPTIONS] key=value ...`: a run over several machines without Slurm.

Checks the run as `laminar train` does, prints an ssh line for each machine as it could be typed, starts them
all, and shows the run's progress until its end. What runs on a machine is `python -m
laminar_hpc.launch.ssh.host`; on one that shares no folder, `laminar join` (launch/ssh/joining.py).
"""

import os
import secrets
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.options import split
from laminar_hpc.launch.slurm.layout import gpus_by_default
from laminar_hpc.launch.slurm.submit import checked_run, look_around, plan_words
from laminar_hpc.launch.ssh.connections import Launcher
from laminar_hpc.launch.ssh.hosts import Host, HostPart, assign, read_hosts
from laminar_hpc.launch.ssh.joining import RunKey, join_line
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.observability import console, output
from laminar_hpc.machine.processes import on_stop_signals

# a machine that does not answer for 20 s is gone; nobody is asked for a password
_OPEN = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
# variables of this shell that the machines get: nothing secret, as command lines can be read by others
_PREFIXES, _NAMES = ("NCCL_", "GLOO_"), ("LAMINAR_INTERFACE", "STORE_DIR", "OMP_NUM_THREADS")


def main(options: Namespace) -> int:
    """Exit code as Launcher.run; 0 when nothing is left to do. Raises LaminarError for what is refused."""
    from laminar_hpc.launch.train_command import say_lacking

    words, ssh = [*plan_words(options.plan), *options.words], split("--ssh", options.ssh)
    if not options.hosts or not words:
        raise LaminarError(
            "laminar launch needs a host file and what laminar train needs: "
            "laminar launch --hosts FILE experiment=..."
        )
    config, derived, settings = checked_run(options, words)
    hosts = read_hosts(Path(options.hosts), gpus_by_default(config))
    only = [name for names in options.only for name in names.split(",") if name]
    parts = chosen(assign(config, derived, hosts), only)
    run_dir, launch = Path(config.run_dir).absolute(), "" if options.dry_run else secrets.token_hex(4)
    if not options.dry_run and not only and not look_around(config):
        return 0
    lines = [(part, command_of(part, ssh, options.tied, launch, run_dir, settings)) for part in parts]
    for _, command in lines:
        print(shlex.join(command), flush=True)
    for text in [] if only else unused(hosts, parts):
        print(text, flush=True)
    if options.dry_run:
        say_lacking(config)
    return 0 if options.dry_run else launched(lines, run_dir, launch)


def chosen(parts: Sequence[HostPart], only: Sequence[str]) -> list[HostPart]:
    """Those of the machines that --only names. Raises LaminarError for a name that has no part."""
    names = [part.host.name for part in parts]
    if wrong := [name for name in only if name not in names]:
        raise LaminarError(f"--only={wrong[0]}: no machine with a part in this run: {', '.join(names)}")
    return [part for part in parts if not only or part.host.name in only]


def unused(hosts: Sequence[Host], parts: Sequence[HostPart]) -> list[str]:
    """A line on machines that have nothing to do."""
    busy = {part.host for part in parts}
    names = [host.name for host in hosts if host not in busy]
    return [console.line("unused", ", ".join(names))] if names else []


def command_of(
    part: HostPart, ssh: Sequence[str], tied: bool, launch: str, run_dir: Path, settings: Sequence[str]
) -> list[str]:
    """The words of one ssh, with its own options `ssh`."""
    binaries = Path(os.environ.get("VENV", sys.prefix)) / "bin"
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    ]
    words = [
        *(["--controller"] if part.controller else []),
        *([f"--trainers={part.trainers[0]}/{part.trainers[1]}"] if part.trainers else []),
        *([f"--replicas={part.replicas}"] if part.replicas else []),
        *(["--relay"] if part.relay else []),
        *(["--tied"] if tied else []),
        *([f"--launch={launch}"] if launch else []),
        f"run_dir={run_dir}",
        *settings,
    ]
    python = str(binaries / "python")
    start = shlex.join(["env", *variables, python, "-m", "laminar_hpc.launch.ssh.host", *words])
    remote = f"cd {shlex.quote(os.getcwd())} && exec {start}"
    if part.joins:
        remote = join_line(binaries, variables, part.replicas, tied)
    return ["ssh", "-T", *_OPEN, *_ALIVE, *ssh, part.host.name, remote]


def launched(lines: Sequence[tuple[HostPart, Sequence[str]]], run_dir: Path, launch: str) -> int:
    """Starts them, until all have ended; the exit code. Raises Refused where it cannot."""
    if shutil.which("ssh") is None:
        raise LaminarError("there is no ssh here: install its client (openssh-client)")
    mark = run_dir / "jobs" / f"launch.{launch}"  # by which each machine sees that it has the same folder
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.parent.mkdir(exist_ok=True)
        durable.write(mark, f"{__version__}\n".encode())
    except OSError as error:
        raise Refused([f"{mark} cannot be written ({error.strerror}): choose another run_dir"]) from None
    key: Callable[[], str] = str
    if any(part.joins for part, _ in lines):
        key = RunKey(run_dir, is_made_anew=any(part.controller for part, _ in lines)).line
    output.guard()
    output.keep_in(run_dir)
    try:
        launcher = Launcher(lines, key=key)
        on_stop_signals(lambda got, _: launcher.on_signal(got))
        return launcher.run()
    finally:
        mark.unlink(missing_ok=True)
