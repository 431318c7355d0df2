"""One role's torchrun, as the scripts of launch/ start it.

    python -m laminar_hpc.cluster.launch_role ROLE PROCESSES run_dir=... [overrides]

A launch.Launch whose last word differs: a death is one line that says who died, how, and what starting it
again can do. Controller and trainers are started again here while the run goes on, as policies/restarts.py
says. torchrun's chatter goes to RUN_DIR/logs/torchrun-<role><first index>.log. Ctrl-C and TERM: the run
cannot do without its controller and trainer, so theirs become `laminar stop`; a relay's or a rollout's end
these processes only.
"""

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from laminar_hpc.cluster import terminal
from laminar_hpc.cluster.address import read_address
from laminar_hpc.cluster.launch import Launch
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.observability import console, jsonl
from laminar_hpc.policies.restarts import Restarts

ONE_AGAIN = "the others go on; start it again with launch/{role}.sh and the same arguments"
CONTROLLER_AGAIN = (
    "the others go on and wait for it (cluster.join_timeout_seconds); start it again with "
    "launch/controller.sh, the same arguments and resume=auto"
)
TRAINER_AGAIN = (
    "the others wait for it (cluster.join_timeout_seconds); start it again with launch/trainer.sh and the "
    "same arguments"
)
AGAIN = {
    "controller": CONTROLLER_AGAIN,
    "trainer": TRAINER_AGAIN,
    "relay": ONE_AGAIN,
    "rollout": ONE_AGAIN,
}
# roles that are started again here: times per hour, with restarts=null
_RESTARTS = {"controller": 10, "trainer": 10}


class RoleLaunch(Launch):
    """A running torchrun of `processes` ranks of config.role."""

    def __init__(self, config: RunConfig, overrides: list[str], processes: int) -> None:
        super().__init__(config, overrides, processes)
        self._config, self._role = config, config.role

    def on_signal(self, number: int) -> None:
        if self._role in ("controller", "trainer") and not terminal.shared():
            super().on_signal(number)
        else:
            self._stops += 1
            self.end()

    def _write_log(self) -> None:
        logs = Path(self._config.run_dir) / "logs"
        with suppress(OSError):  # a full disk, which the run itself has named
            if logs.is_dir():
                log = logs / f"torchrun-{self._role}{self._config.first_index}.log"
                with open(log, "a") as file:
                    file.writelines(self._chatter)

    @property
    def is_final(self) -> bool:
        """Whether these processes would find nothing to do, or fail again for sure."""
        run_is_over = read_address(Path(self._config.run_dir)) is None
        return bool(self._stops) or self.is_permanent or run_is_over

    def _explain(self, rank: int, number: int) -> str:
        """Who died and how. "" where nobody needs to be told: the user ended it, or what failed has said so
        here."""
        logs = Path(self._config.run_dir) / "logs"
        again = AGAIN[self._role].format(role=self._role)
        if self._stops:
            return ""
        if rank < 0:
            return f"the torchrun of {self._role} ended without a word; see {logs}; {again}"
        name = f"{self._role} {self._config.first_index + rank}"
        if number == terminal.FAILED_ELSEWHERE:
            return (
                "" if terminal.shared() else f"{name} has left, as the controller told it to, which says why"
            )
        how = (
            f"was killed by {signal.Signals(-number).name}"
            if number < 0
            else f"ended with exit code {number}"
        )
        return f"{name} {how}; see {logs / name.replace(' ', '')}.log; {again}"


def _last_step(config: RunConfig) -> int:
    """The newest step done; 0 before the first."""
    records = list(jsonl.read(Path(config.run_dir) / "metrics.jsonl", "step"))
    return records[-1]["step"] if records else 0


def main(arguments: list[str]) -> int:
    """Exit code: 0 = done or stopped in order, 1 = failed or ended, 2 = refused before it began."""
    role, processes, *overrides = arguments
    try:
        overrides = [f"role={role}", *overrides]
        config = load_config(overrides)
    except LaminarError as error:
        for line in str(error).splitlines():
            print(f"laminar: error: {line}", file=sys.stderr, flush=True)
        return 2
    per_hour = _RESTARTS.get(role, 0)
    restarts = Restarts(per_hour if config.restarts is None or not per_hour else config.restarts)
    config.restarts = restarts.per_hour  # its errors are kept until it is known whether that was the end
    launch = RoleLaunch(config, overrides, int(processes))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda got, _: launch.on_signal(got))
    while (code := launch.wait()) != 0:
        if launch.is_final:
            break
        if why_not := restarts.refusal(launch.cause, _last_step(config), time.time()):
            launch.print_error(f"; not started again: {why_not}" if restarts.per_hour else "")
            break
        count = f"{role}: {len(restarts.times)} of {restarts.per_hour} within an hour"
        cause = launch.cause.removesuffix(f"; {AGAIN[role].format(role=role)}") or "told to leave"
        print(console.line("restart", f"{count}: {cause}"), flush=True)
        resume = ["resume=auto"] if role == "controller" else []
        launch = RoleLaunch(config, [*overrides, *resume], int(processes))
    launch.print_error()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
