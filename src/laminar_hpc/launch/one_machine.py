"""`laminar train` with rollout.replicas=MIN:MAX: the roles of a run on this machine, each by itself, so that
replicas may come and go. The controller says how many more it wants (line/agent_line.py); each is started on
the first free place of MAX, which has GPUs of its own.
"""

from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.config.check import Derived
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.launch import NodeAgent, WorkerGroup
from laminar_hpc.launch.launch_role import RolePart, stops_by_command
from laminar_hpc.line.agent_line import RankOrders
from laminar_hpc.machine.processes import on_stop_signals

_BESIDE = "; the others go on, and another is started where the run has too few"


class ReplicaPlaces:
    """The places of this machine; whoever has one is among `groups`, which this object adds to."""

    def __init__(
        self, part: RolePart, orders: RankOrders, groups: list[WorkerGroup], controller: WorkerGroup
    ) -> None:
        self._part = part
        self._orders = orders
        self._groups = groups
        self._controller = controller
        self._heard = 0  # of what the controller of this life has asked for
        self._life = controller.life
        self._here: dict[int, WorkerGroup] = {}

    def start(self, count: int) -> None:
        """As many as there are places for."""
        taken = {place for place, group in self._here.items() if group.code is None}
        free = [place for place in range(self._part.processes) if place not in taken]
        for place in free[:count]:
            (group,) = self._part.start(self._orders, places=[place], advice=_BESIDE)
            self._here[place] = group
            self._groups.append(group)

    def look(self) -> None:
        """Starts what is asked for, and forgets who has ended: that is no failure of the run."""
        for group in self._here.values():
            if group.code in (0, 1) and group in self._groups and self._controller.code is None:
                self._groups.remove(group)
        if self._life is not self._controller.life:
            self._life = self._controller.life
            self._heard = 0
        wanted = self._life.to_start - self._heard
        if wanted > 0 and not any(group.is_told for group in self._groups):
            self._heard += wanted
            self.start(wanted)


def run(config: RunConfig, derived: Derived, words: Sequence[str]) -> int:
    """Runs the job to its end. Exit code 0 when it is done or stopped in order, 2 when refused, else 1."""
    run_dir, own = Path(config.run_dir), list(words)
    orders = RankOrders(one_terminal=True, starts_replicas=True)
    (controller,) = RolePart("controller", 1, own).start(orders)
    groups: list[WorkerGroup] = [controller]
    for role, count in (("relay", derived.relay_ranks_per_machine), ("trainer", derived.trainer_ranks)):
        groups += RolePart(role, count, own).start(orders)
    places = ReplicaPlaces(RolePart("rollout", config.rollout.most, own), orders, groups, controller)
    places.start(config.rollout.fewest)
    agent = NodeAgent(run_dir, groups, one_terminal=True, ask=stops_by_command(run_dir))
    on_stop_signals(agent.on_signal)
    return agent.run(places.look)
