"""The processes of one role on this machine, as the scripts of launch/ start them: a torchrun, or for
rollouts a plain process per replica, so that the death of one ends no other.

    python -m laminar_hpc.cluster.launch_role ROLE PROCESSES run_dir=... [overrides]

Differs from launch.Launch in what it says at the end: a death is one line on who died, how, and what starting
it again can do. Controller and trainers are started again here while the run goes on, as policies/restarts.py
says; after a death of a full disk when there is room. torchrun's chatter goes to
RUN_DIR/logs/torchrun-<role><first index>.log. Ctrl-C and TERM: the run cannot do without its controller and
trainer, so theirs become `laminar stop`; relays and rollouts are told to leave, the run goes on, and the exit
code is theirs. A second one ends them at once.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from laminar_hpc.cluster import terminal
from laminar_hpc.cluster.full_disk import NO_ROOM, await_room
from laminar_hpc.cluster.launch import (
    DEAF,
    GONE_SECONDS,
    LEAVES_ALONE,
    REFUSED,
    REPEAT_SECONDS,
    Launch,
    reason_of,
)
from laminar_hpc.cluster.processes import on_stop_signals
from laminar_hpc.cluster.run_end import goes_on
from laminar_hpc.cluster.stop import ask_trainers_to_leave
from laminar_hpc.config.errors import LaminarError, print_lines
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.observability import console, jsonl, output
from laminar_hpc.policies.restarts import Restarts

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
    "relay": "the others go on; start it again with launch/relay.sh and the same arguments",
    "rollout": "the others go on; start another with launch/rollout.sh at any time",
}
# roles that are started again here: times per hour, with restarts=null
_RESTARTS = {"controller": 10, "trainer": 10}
_ASK_SECONDS = 3.0


class RoleLaunch(Launch):
    """A running torchrun of `processes` ranks of config.role."""

    def __init__(self, config: RunConfig, overrides: list[str], processes: int) -> None:
        super().__init__(config, overrides, processes)
        self._config, self._role = config, config.role

    def on_signal(self, number: int) -> None:
        if number == signal.SIGTERM and os.environ.get(DEAF):
            return None
        alone = self._role == "trainer" and os.environ.get(LEAVES_ALONE)
        if self._role in ("controller", "trainer") and not (alone or terminal.shared()):
            return super().on_signal(number)
        now = time.monotonic()
        if not self._stops or now - self._asked >= REPEAT_SECONDS:
            self._stops, self._asked = self._stops + 1, now
            if self._stops > 1 or (alone and not self._is_at_work):
                self.end()
            elif alone:
                threading.Thread(target=self._ask_to_leave, args=(reason_of(number),), daemon=True).start()
            else:
                self.leave()
        return None

    @property
    def _is_at_work(self) -> bool:
        return bool(self.joined_as) and self._process.poll() is None

    def _ask_to_leave(self, reason: str) -> None:
        """For the trainers of all nodes, again and again: controllers change."""
        while self._config.first_index == 0 and self._process.returncode is None:
            ask_trainers_to_leave(Path(self._config.run_dir), reason)
            time.sleep(_ASK_SECONDS)

    def hear_late(self, before: "RoleLaunch") -> None:
        """What the life before was told after its end, and nobody else has taken."""
        if before._is_told:
            self._stops = max(self._stops, before._stops)
            self.end()

    def leave(self) -> None:
        """Tells the ranks, not their torchrun, which would fail."""
        if self._role in ("controller", "trainer") or not (ranks := self._ranks()):
            return self.end()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.terminate()
        timer = threading.Timer(GONE_SECONDS, self._kill, [signal.SIGKILL])
        timer.daemon = True
        timer.start()
        return None

    def wait(self) -> int:
        """As Launch.wait; 0 as well for a rank that was told to leave before it could hear of it."""
        code = super().wait()
        unborn = self._root_cause(self._process.returncode)[1] == -signal.SIGTERM
        return 0 if self._stops == 1 and unborn else code

    def _ranks(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children()
        return []

    def _write_log(self) -> None:
        logs = Path(self._config.run_dir) / "logs"
        with suppress(OSError):  # a full disk, which the run itself has named
            if logs.is_dir() and self._chatter:
                with open(logs / self._log_name(), "a") as file:
                    file.writelines(self._chatter)

    def _log_name(self) -> str:
        return f"torchrun-{self._role}{self._config.first_index}.log"

    @property
    def is_final(self) -> bool:
        """Whether these processes would find nothing to do, or fail again for sure."""
        return bool(self._stops) or self.is_permanent or not goes_on(Path(self._config.run_dir))

    def awaits_room(self) -> bool:
        """After a death for want of room; True when there is some again."""
        if NO_ROOM not in self.cause or self._stops:
            return False
        print(console.line("waits", f"{self._role}: {self.cause.partition(': make room')[0]}"), flush=True)
        return await_room(self._config, lambda: bool(self._stops))

    def _explain(self, rank: int | None, number: int) -> str:
        """Who died and how. "" where nobody needs to be told: the user ended it, or what failed has said so
        here."""
        logs = Path(self._config.run_dir) / "logs"
        again = AGAIN[self._role]
        if self._stops:
            return ""
        if rank is None:
            return f"the torchrun of {self._role} ended without an error message; see {logs}; {again}"
        name = self._name(rank)
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

    def _name(self, rank: int) -> str:
        return f"{self._role} {self._config.first_index + rank}"


class ReplicaLaunch(RoleLaunch):
    """One replica, number `place` of the `processes` that start here: it takes its share of the machine's
    GPUs by that."""

    def __init__(self, config: RunConfig, overrides: list[str], processes: int, place: int) -> None:
        self._place = place
        super().__init__(config, overrides, processes)

    def _runner(self) -> list[str]:
        return []

    def _environment(self) -> dict[str, str]:
        rank, world = str(self._place), str(self._world)
        return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}

    def _ranks(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(self._process.pid)]
        return []

    def _log_name(self) -> str:
        return "launch-rollout.log"

    def _root_cause(self, code: int) -> tuple[int | None, int]:
        return self._place, code

    def _name(self, rank: int) -> str:
        return self.joined_as or f"a rollout (number {rank} of those started here)"


def launch_replicas(config: RunConfig, overrides: list[str], processes: int) -> int:
    """Until the last one has ended. Exit code: 0 = all done or left in order, 2 = refused, 1 = one failed."""
    config.restarts = 0
    launches = [ReplicaLaunch(config, overrides, processes, place) for place in range(processes)]
    codes: list[int] = []

    def watch(launch: ReplicaLaunch) -> None:
        codes.append(launch.wait())
        launch.print_error()
        if codes[-1] == REFUSED:  # the others wait for this one to say so
            for other in launches:
                other.on_signal(signal.SIGINT)

    def on_signal(number: int, _: object) -> None:
        for launch in launches:
            launch.on_signal(number)

    on_stop_signals(on_signal)
    threads = [threading.Thread(target=watch, args=(launch,)) for launch in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return REFUSED if REFUSED in codes else max(codes, default=0)


def _last_step(config: RunConfig) -> int:
    """The newest step done; 0 before the first."""
    records = list(jsonl.read(Path(config.run_dir) / "metrics.jsonl", "step"))
    return records[-1]["step"] if records else 0


def main(arguments: list[str]) -> int:
    """Exit code: 0 = done or stopped in order, 1 = failed or ended, 2 = refused before it began."""
    output.guard()
    role, processes, *overrides = arguments
    try:
        overrides = [f"role={role}", *overrides]
        config = load_config(overrides)
        output.keep_in(Path(config.run_dir))
    except LaminarError as error:
        print_lines(error)
        return 2
    if role == "rollout":
        return launch_replicas(config, overrides, int(processes))
    per_hour = _RESTARTS.get(role, 0)
    restarts = Restarts(per_hour if config.restarts is None or not per_hour else config.restarts)
    config.restarts = restarts.per_hour  # its errors are kept until it is known whether that was the end
    launch = RoleLaunch(config, overrides, int(processes))
    on_stop_signals(lambda got, _: launch.on_signal(got))
    while (code := launch.wait()) != 0:
        has_room = launch.is_final and restarts.per_hour > 0 and launch.awaits_room()
        if launch.is_final and not has_room:
            break
        if why_not := restarts.refusal(launch.cause, _last_step(config), time.time(), gone=has_room):
            launch.print_error(f"; not started again: {why_not}" if restarts.per_hour else "")
            break
        count = f"{role}: {len(restarts.times)} of {restarts.per_hour} within an hour"
        cause = launch.cause.removesuffix(f"; {AGAIN[role]}") or "told to leave"
        print(console.line("restart", f"{count}: {cause}"), flush=True)
        resume = ["resume=auto"] if role == "controller" else []
        before, launch = launch, RoleLaunch(config, [*overrides, *resume], int(processes))
        launch.hear_late(before)
    launch.print_error()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
