"""A node's part of one torchrun world over all nodes of a job (slurm/laminar_single.sbatch).

    python -m laminar_hpc.jobs.world NODE NODES HEAD PORT ADDRESS [overrides]

Node 0 says in RUN_DIR/jobs/head.LIFE where the nodes meet. USR1 and TERM become `laminar stop`. What torchrun
says goes to RUN_DIR-torchrun<node>.log, errors to the job's output, one line each.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from laminar_hpc.cluster import durable
from laminar_hpc.cluster.launch import Launch
from laminar_hpc.cluster.processes import on_stop_signals
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.jobs.network import await_file, free_port
from laminar_hpc.observability import output

_MEET_SECONDS = 300.0  # for the head node to say where


def world_command(
    run_dir: Path, life: str, node: int, nodes: int, address: str, words: list[str]
) -> list[str]:
    """What starts this node's part. Waits on other nodes than the head until it has said where it is; raises
    LaminarError when it does not."""
    place = run_dir / "jobs" / f"head.{life}"
    if node == 0:
        head = os.environ.get("HEAD_ADDR") or address
        durable.replace(place, f"{head} {free_port(head)}\n".encode())
    head, port = await_file(place, _MEET_SECONDS).split()
    common = [f"run_dir={run_dir}", f"cluster.host={address}"]
    start = [sys.executable, "-m", "laminar_hpc.jobs.world"]
    return [*start, str(node), str(nodes), head, port, address, *common, *words, "resume=auto"]


class WorldLaunch(Launch):
    """A running torchrun of this node's ranks."""

    def __init__(self, config: RunConfig, overrides: list[str], node: int, meeting: list[str]) -> None:
        self._node, self._meeting_place = node, meeting
        super().__init__(config, overrides, int(os.environ.get("NPROC_PER_NODE", "2")))

    def _runner(self) -> list[str]:
        return ["torch.distributed.run", f"--nproc-per-node={self._world}", *self._meeting_place, "-m"]

    def _environment(self) -> dict[str, str]:
        return {}

    def _write_log(self) -> None:
        run_dir = Path(self._config.run_dir)
        log = run_dir.with_name(f"{run_dir.name}-torchrun{self._node}.log")
        with suppress(OSError):
            log.touch(mode=0o600)
            with open(log, "a") as file:
                file.writelines(self._chatter)

    def _explain(self, rank: int | None, number: int) -> str:
        """Which of this node's ranks died, and how."""
        logs = Path(self._config.run_dir) / "logs"
        if rank is None:
            return f"node {self._node} of the job ended without an error message; see {logs}"
        how = (
            f"was killed by {signal.Signals(-number).name}"
            if number < 0
            else f"ended with exit code {number}"
        )
        return f"rank {rank} {how}; see {logs}"


def main(arguments: list[str]) -> int:
    """Exit code as Launch.wait."""
    node, nodes, head, port, address, *words = arguments
    meeting = [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--master-addr={head}",
        f"--master-port={port}",
        f"--local-addr={address}",
    ]
    output.guard()
    config = load_config(words)
    output.keep_in(Path(config.run_dir))
    launch = WorldLaunch(config, words, int(node), meeting)
    on_stop_signals(lambda got, _: launch.on_signal(got))
    code = launch.wait()
    if config.restarts:  # then the error was kept for who would start it again
        launch.print_error()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
