"""What is left of a run when its trainers are done: the last evaluation, for which it does not wait for ever.

    TrainerDone -> shares to replicas (evaluations.py) -> the last score: finished
                   nobody at work on what is due for too long -> LaminarError
                   nothing due at a controller that took over -> finished

A replica that has a share is awaited: its own watchdogs bound what it does, its silence and its death give
the share to others.
"""

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.tables import Tables


class LastEvaluation:
    """Called at each tick."""

    def __init__(self, tables: Tables) -> None:
        self._shared = tables
        self._state = tables.state
        self._idle_since: float | None = None

    def tick(self, now: float) -> None:
        """`now`: monotonic seconds. Raises LaminarError when nobody was at work on what is due for
        cluster.batch_timeout_seconds: as long as trainers wait for rollouts, too."""
        due = self._shared.evaluations.queue if self._shared.evaluations else []
        idle = self._state.trainer_done and not self._state.finished and all(each.idle for each in due)
        if not idle or self._idle_since is None:
            self._idle_since = now if idle else None
            return
        seconds = self._shared.config.cluster.batch_timeout_seconds
        if now - self._idle_since <= seconds:
            return
        if not due:
            self._state.finished = True
            return
        rollouts = self._shared.members.count("rollout")
        raise LaminarError(
            f"the trainers are done, and none of {rollouts} rollouts was at work on the last evaluation for "
            f"{seconds:.0f} s (cluster.batch_timeout_seconds): see their logs and those of the relays, then "
            "start all roles again with resume=auto, which makes up for it"
        )
