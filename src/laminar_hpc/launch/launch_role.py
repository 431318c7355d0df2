"""Groups of one role, and the agent of the scripts of launch/:

    python -m laminar_hpc.launch.launch_role ROLE PROCESSES [ROLE PROCESSES ...] run_dir=... [overrides]

Each rollout is a group of its own, so that the death of one ends no other. A death is one line on who died,
how, and what starting it again can do. Controller and trainers are started again here while the run goes on,
as policies/restarts.py says; after a death of a full disk when there is room. Ctrl-C and TERM: the run cannot
do without its controller and trainers, so theirs become `laminar stop`; relays and rollouts are told to
leave, the run goes on, and the exit code is theirs. A second one ends them at once.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, print_lines
from laminar_hpc.config.load import load_config
from laminar_hpc.launch import cli
from laminar_hpc.launch.launch import NodeAgent, WorkerGroup
from laminar_hpc.launch.ranks import Ranks
from laminar_hpc.line.agent_line import FAILED_ELSEWHERE, RankOrders
from laminar_hpc.machine.observability import output
from laminar_hpc.machine.processes import on_stop_signals
from laminar_hpc.policies.restarts import Restarts
from laminar_hpc.store.run_end import goes_on

AGAIN = {
    "controller": "the others go on and wait for it (cluster.join_timeout_seconds); start it again with "
    "launch/controller.sh, the same arguments and resume=auto",
    "trainer": "the others wait for it (cluster.join_timeout_seconds); start it again with launch/trainer.sh "
    "and the same arguments",
    "relay": "the others go on; start it again with launch/relay.sh and the same arguments",
    "rollout": "the others go on; start another with launch/rollout.sh at any time",
}
PER_HOUR = 10  # restarts, where `restarts` does not say


class RoleGroup(WorkerGroup):
    """All ranks of a role on this machine, or one rollout."""

    def name(self, rank: int) -> str:
        if self.role == "rollout":
            return self.life.joined_as or f"a rollout (number {rank} of those started here)"
        return f"{self.role} {self.config.first_index + rank}"

    def log(self) -> Path:
        index = "" if self.role == "rollout" else self.config.first_index
        return self.logs / f"launch-{self.role}{index}.log"

    def may_go_on(self) -> bool:
        return goes_on(self.run_dir)

    def explain(self, rank: int, number: int) -> str:
        if self.is_told or (number == FAILED_ELSEWHERE and self.orders.one_terminal):
            return ""
        if number == FAILED_ELSEWHERE:
            return f"{self.name(rank)} has left, as the controller told it to, which says why"
        return super().explain(rank, number)


@dataclass(frozen=True)
class RolePart:
    """What a machine starts of a role: `words` make its ranks compose their configuration."""

    role: str
    processes: int
    words: list[str]

    def start(
        self,
        orders: RankOrders,
        tended: bool = False,
        places: Sequence[int] | None = None,
        advice: str | None = None,
    ) -> list[WorkerGroup]:
        """`tended`: nobody sits in front of it, so that relays and rollouts are started again too. `places`:
        of rollouts only these; `advice`: behind how one died, in place of the usual one. Raises LaminarError
        for words that are refused."""
        words, count = [f"role={self.role}", *self.words], self.processes
        config = load_config(words)
        if self.role in ("controller", "trainer"):
            restarts = Restarts(PER_HOUR if config.restarts is None else config.restarts)
        else:
            restarts = Restarts(PER_HOUR if tended else 0)
        each: list[Sequence[int]] = [range(count)]
        if self.role == "rollout":
            each = [[place] for place in (range(count) if places is None else places)]
        advice = f"; {AGAIN[self.role]}" if advice is None else advice
        return [
            RoleGroup(config, words, Ranks(here, count), restarts, orders, advice=advice) for here in each
        ]


def stops_by_command(run_dir: Path) -> Callable[[str], None]:
    """What a signal means where all roles print to one terminal."""

    def stop(_: str) -> None:
        cli.run(["stop", str(run_dir)])

    return stop


def main(arguments: list[str]) -> int:
    """Exit code: 0 = done or stopped in order, 1 = failed or ended, 2 = refused before it began."""
    output.guard()
    split = next(number for number, word in enumerate(arguments) if "=" in word)
    words, several = arguments[split:], split > 2
    try:
        run_dir = Path(load_config(words).run_dir)
        output.keep_in(run_dir)
        parts = [RolePart(arguments[n], int(arguments[n + 1]), words) for n in range(0, split, 2)]
        groups = [group for part in parts for group in part.start(RankOrders(one_terminal=several))]
    except LaminarError as error:
        print_lines(error)
        return 2

    ask = stops_by_command(run_dir) if several else None
    agent = NodeAgent(run_dir, groups, one_terminal=several, ask=ask)
    on_stop_signals(agent.on_signal)
    return agent.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
