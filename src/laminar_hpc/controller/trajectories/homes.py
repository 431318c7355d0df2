"""Environments that stay with the replica that made them, while their trajectories are with others.

    holder --Ask--> here --> home --Answer--> controller/trajectories/answers.py --> whoever has the
    trajectory by now holder --Generated, with its home--> `grades` --ScoreOrder--> home --Scored-->
    the trajectory has ended, or begins again --> LetGo --> home
    home lost --> the holder is told so, and what is known of the trajectory is forgotten: it begins again

Owns nothing: where an environment is stands in its name, which each response so far carries.
"""

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.tables import Tables
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.homes import Ask, LetGo, replica_of
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.line.messages.rollouts import Generated, ScoreOrder


class HomeRouting:
    """Called for Ask, for Generated with a home, when a replica is lost or leaves, and once in each turn."""

    def __init__(self, tables: Tables) -> None:
        self._shared = tables
        self._tracker = tables.tracker
        self._replicas = tables.replicas
        self._pool = tables.pool

    def on_ask(self, member: Member, ask: Ask) -> None:
        replica = replica_of(ask.home)
        if replica in self._replicas.leaving() or not self._send(ask.home, ask):
            self._shared.outbox.send(member, Answer(ask.trajectory_id, ask.name, error=_lost(replica)))

    def grader(self, generated: Generated) -> int | None:
        """The replica that is to grade it; None where that is gone."""
        replica = replica_of(generated.home)
        return replica if self._shared.members.at("rollout", replica) else None

    def grades(self, generated: Generated) -> None:
        """The trajectory's response is stored: its home may grade it."""
        trajectory = generated.trajectory
        assert trajectory.place is not None
        group = self._tracker.groups.bare(trajectory.trajectory_id)
        order = ScoreOrder(trajectory.trajectory_id, trajectory.attempt, group, trajectory.place)
        order.home = generated.home
        order.figures = generated.figures
        self._send(generated.home, order)

    def replica_lost(self, replica: int) -> None:
        """Or it is about to end. Nothing comes of what its environments were asked."""
        for trajectory_id, name in self._pool.forget_home(replica):
            owner, _ = self._tracker.groups.owner(trajectory_id)
            if name and owner is not None and owner != replica:
                answer = Answer(trajectory_id, name, error=_lost(replica))
                self._shared.outbox.send(self._shared.members.at("rollout", owner), answer)

    def let_go(self) -> None:
        """Those that the pool has seen the end of, in this turn."""
        for name in self._pool.take_left():
            self._send(name, LetGo(name))

    def _send(self, name: str, message: Message) -> bool:
        member = self._shared.members.at("rollout", replica_of(name))
        if member is not None:
            self._shared.outbox.send(member, message)
        return member is not None


def _lost(replica: int) -> str:
    return f"replica {replica} was lost with its environment"
