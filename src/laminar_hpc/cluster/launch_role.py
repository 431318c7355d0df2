"""One role's torchrun, as the scripts of launch/ start it.

    python -m laminar_hpc.cluster.launch_role ROLE PROCESSES run_dir=... [overrides]

A launch.Launch whose last word differs: a death is one line that says who died, how, and what starting it
again can do. torchrun's chatter goes to RUN_DIR/logs/torchrun-<role><first index>.log. Ctrl-C and TERM: the
run cannot do without its controller and trainer, so theirs become `laminar stop`; a relay's or a rollout's
end these processes only.
"""

import signal
import sys
from contextlib import suppress
from pathlib import Path

from laminar_hpc.cluster import terminal
from laminar_hpc.cluster.launch import Launch
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig

ALL_AGAIN = (
    "the run ends without it; start all roles again with resume=auto: it goes on from its newest checkpoint"
)
ONE_AGAIN = "the others go on; start it again with launch/{role}.sh and the same arguments"
AGAIN = {"controller": ALL_AGAIN, "trainer": ALL_AGAIN, "relay": ONE_AGAIN, "rollout": ONE_AGAIN}


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
                log.write_text("".join(self._chatter))

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
                ""
                if terminal.shared()
                else f"{name} has left, because the run has failed; the controller says why"
            )
        how = (
            f"was killed by {signal.Signals(-number).name}"
            if number < 0
            else f"ended with exit code {number}"
        )
        return f"{name} {how}; see {logs / name.replace(' ', '')}.log; {again}"


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
    launch = RoleLaunch(config, overrides, int(processes))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda got, _: launch.on_signal(got))
    code = launch.wait()
    launch.print_error()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
