"""What becomes of a trajectory that has left the local batch: stored and scored, lost, or handed over.

Owned by worker.py. A response goes into a payload file, and Generated out behind it; scores delay nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.line.messages.rollouts import Generated, Lost
from laminar_hpc.rollout.health import BatchHealth
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.payloads import Payloads
from laminar_hpc.rollout.scoring import Scoring

logger = logging.getLogger(__name__)


class Results:
    """`finished(tokens)` is called for each whole response."""

    def __init__(
        self,
        context: RoleContext,
        payloads: Payloads,
        scoring: Scoring,
        health: BatchHealth,
        finished: Callable[[int], None],
    ) -> None:
        self._context = context
        self._payloads = payloads
        self._scoring = scoring
        self._health = health
        self._finished = finished

    def ended(self, trajectory: TrajectoryInFlight, outcome: Outcome) -> None:
        """It has its last token, or `outcome.lost` says why it will not."""
        if (lost := outcome.lost) is not None:
            self._health.lost(trajectory, lost, bool(outcome.ungraded))
            if outcome.ungraded and trajectory.evaluation:
                self._generated(trajectory)
                self._scoring.ungraded(trajectory, lost)
            else:
                self.lost(trajectory, lost, outcome.ungraded)
            return
        self._health.finished(trajectory.partial.count)
        self._finished(trajectory.partial.count)
        self._generated(trajectory)
        self._scoring.begin(trajectory)

    def _generated(self, trajectory: TrajectoryInFlight) -> None:
        """Reports a complete response. Of an evaluation only the score is kept."""
        response = trajectory.packed()
        generated = Generated(trajectory.finished(self._context.index, response), trajectory.evaluation)
        if trajectory.evaluation:
            self._context.channel.send(generated)
            return
        if self._scoring.graded_elsewhere(trajectory) and trajectory.episode is not None:
            generated.home = trajectory.partial.home
            generated.figures = trajectory.episode.figures(time.time())
        written = self._payloads.append(response, trajectory.packed_routes())
        self._context.channel.send_after(written, partial(_stored, generated))

    def lost(self, trajectory: TrajectoryInFlight, reason: str, ungraded: int = 0) -> None:
        """It is granted anew, to whomever. `ungraded`: its environment failed so many times."""
        logger.warning(
            "trajectory %d (attempt %d) is lost: %s", trajectory.trajectory_id, trajectory.attempt, reason
        )
        lost = Lost(trajectory.trajectory_id, trajectory.attempt, reason, trajectory.evaluation, ungraded)
        self._context.channel.send(lost)

    def hand_over(self, left: Iterable[TrajectoryInFlight], reason: str) -> None:
        """They go on elsewhere from what is known of them; an evaluation's begin again."""
        for trajectory in left:
            if trajectory.evaluation:
                self.lost(trajectory, reason)
            else:
                self._context.channel.send(trajectory.unfinished())


def _stored(generated: Generated, place: ResponsePlace) -> Generated:
    generated.trajectory.place = place
    return generated
