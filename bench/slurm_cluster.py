"""A real Slurm of several nodes on this machine, by tests/slurm/slurm_up.sh, for bench/chaos.py.

Each node has an address, a host name, processes and /dev/shm of its own; its power and its cable can be cut.
All see one folder, `shared`, a file system of its own that can be filled. Jobs of the partition `urgent`
preempt those of `batch`, which have `GRACE_SECONDS` to leave. However the bench ends, its Slurm does too: a
process of its own waits for that.
"""

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType

import common

SCRIPTS = common.ROOT / "tests" / "slurm"
GRACE_SECONDS = 60  # two cores for four nodes; docs/slurm.md asks for 30
SHARED_MB, SHM_MB = 1500, 1024
_CONF = """\
SlurmdTimeout={timeout}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
# SCRIPTS FOLDER: until its standard input ends, which the bench holds; one that was killed removes nothing
_KEEPER = """\
cat
"$1/slurm_down.sh" "$2"; code=$?
umount -l "$2/shared"
[ -d /proc/$PPID ] || rm -rf "$2"
exit $code
"""
_END_SECONDS = 120.0
_ASK_SECONDS = 60.0
_LOG = "scripts.log"


def missing() -> str:
    """Why no Slurm can be started here, "" if it can."""
    if os.geteuid() != 0:
        return "bench/chaos.py starts a Slurm with nodes of their own: it needs root"
    return ""


class SlurmCluster:
    """A running Slurm with nodes n1, n2, ... from `with` to its end. `slurmd_timeout`: seconds of silence
    until Slurm takes a node for dead."""

    def __init__(self, folder: Path, nodes: int, slurmd_timeout: int) -> None:
        self.folder, self.shared = folder, folder / "shared"
        self._nodes, self._timeout = nodes, slurmd_timeout
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "etc/slurm.conf")}
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "SlurmCluster":
        self.shared.mkdir(parents=True)
        mount = ("mount", "-t", "tmpfs", "-o", f"size={SHARED_MB}m", "tmpfs", str(self.shared))
        subprocess.run(mount, check=True, timeout=30)
        with open(self.folder / _LOG, "ab") as log:
            self._keeper = subprocess.Popen(
                ["bash", "-c", _KEEPER, "keeper", str(SCRIPTS), str(self.folder)],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            conf = self.folder / "more.conf"
            conf.write_text(_CONF.format(timeout=self._timeout))
            counts = ("--nodes", str(self._nodes), "--cpus", "4", "--gpus", "0", "--mode", "netns")
            self._script("slurm_up.sh", *counts, "--conf", str(conf), seconds=240)
            grace = f"GraceTime={GRACE_SECONDS}"
            self.command("scontrol", "update", "PartitionName=batch", grace)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        self._keeper.stdin.close()
        if (code := self._keeper.wait(_END_SECONDS)) and error is None:
            raise SystemExit(f"slurm_down.sh {self.folder} failed ({code}):\n{self._said()}")

    def _script(self, name: str, *words: str, seconds: float) -> None:
        """Its output goes to a file: daemons that it starts would keep a pipe open."""
        command = [str(SCRIPTS / name), str(self.folder), *words]
        environment = {**self.environment, "SHM_MB": str(SHM_MB)}
        with open(self.folder / _LOG, "ab") as log:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=seconds,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{self._said()}")

    def _said(self) -> str:
        return "\n".join((self.folder / _LOG).read_text(errors="replace").splitlines()[-5:])

    def ask(self, *words: str) -> str:
        """The standard output of a question to Slurm, which is put again while nothing comes of it."""
        until = time.monotonic() + _ASK_SECONDS
        while True:
            try:
                return self.command(*words)
            except (SystemExit, subprocess.TimeoutExpired):
                if time.monotonic() > until:
                    raise
                time.sleep(1)

    def command(self, *words: str, seconds: float = 30.0, **environment: str) -> str:
        """The standard output of a command of Slurm, or of `laminar`. Raises SystemExit with its words when
        it fails."""
        done = subprocess.run(
            words,
            env={**self.environment, **environment},
            cwd=common.ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def node(self, verb: str, name: str, *words: str) -> None:
        """off, on, cut or mend a node, or exec a command in it; see slurm_node.sh."""
        self._script("slurm_node.sh", verb, name, *words, seconds=90)

    def resume(self) -> None:
        """Gives back to Slurm the nodes that it has drained: one that was away for longer than it waits comes
        back with the job that was given to others, and that needs an administrator."""
        for name in self.ask("sinfo", "-h", "-N", "-p", "batch", "-t", "drained", "-o", "%n").split():
            self.command("scontrol", "update", f"NodeName={name}", "State=RESUME")

    def is_up(self, name: str) -> bool:
        """Whether Slurm would give jobs to this node."""
        state = self.ask("sinfo", "-h", "-n", name, "-p", "batch", "-o", "%T").strip()
        return state.rstrip("*") in ("idle", "mixed", "allocated", "completing")
