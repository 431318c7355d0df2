"""What came of calls whose trajectory has moved while they were made: it follows the trajectory.

    source --MoveReady: a Partial that awaits an Answer--> destination
    source --Answer--> here --> whoever has the trajectory by now

The destination of a move under way has it as well: what it was sent may not have it yet. The pool has it
too, so that a rescue goes on behind the calls. When the replica that makes them is lost, the
owner is told that nothing will come. Owns nothing: a controller that takes over passes on what arrives, and
an owner that waits in vain gives up by itself.
"""

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.migration import Migration
from laminar_hpc.line.messages.moves import Answer


class AnswerRouting:
    """Called for Answer, and when a replica is lost."""

    def __init__(self, tables: Tables, migration: Migration) -> None:
        self._shared = tables
        self._tracker = tables.tracker
        self._pool = tables.pool
        self._migration = migration

    def on_answer(self, _: Member | None, answer: Answer) -> None:
        self._pool.answered(answer)
        owner, _attempt = self._tracker.groups.owner(answer.trajectory_id)
        for replica in {owner, self._migration.destination(answer.trajectory_id)}:
            if replica is not None:
                self._shared.outbox.send(self._shared.members.at("rollout", replica), answer)

    def replica_lost(self, replica: int) -> None:
        """Nothing will come of the calls that it made for others."""
        for trajectory_id, name in self._pool.awaited_of(replica):
            error = f"replica {replica} was lost while it made its calls"
            self.on_answer(None, Answer(trajectory_id, name, error=error))
