"""What becomes of a trajectory that has left the local batch: stored and scored, lost, or handed over.

Owned by worker.py. A response goes into a payload file, and Generated out behind it; scores delay nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.messages.data import Place
from laminar_hpc.messages.rollouts import Generated, Lost, Unfinished
from laminar_hpc.payload.writer import PayloadWriter
from laminar_hpc.rollout.health import BatchHealth
from laminar_hpc.rollout.scoring import Scoring
from laminar_hpc.rollout.work import Work, packed, trajectory

logger = logging.getLogger(__name__)


class Results:
    """`finished(tokens)` is called for each whole response."""

    def __init__(
        self,
        context: RoleContext,
        payloads: PayloadWriter,
        scoring: Scoring,
        health: BatchHealth,
        finished: Callable[[int], None],
    ) -> None:
        self._context, self._payloads, self._scoring = context, payloads, scoring
        self._health, self._finished = health, finished

    def ended(self, work: Work, lost: str | None) -> None:
        """It has its last token, or `lost` says why it will not."""
        if lost is not None:
            self._health.lost(work, lost)
            if work.ungraded and work.evaluation:
                self._generated(work)
                self._scoring.ungraded(work, lost)
            else:
                self.lost(work, lost)
            return
        self._health.finished(work.partial.count)
        self._finished(work.partial.count)
        self._generated(work)
        self._scoring.begin(work)

    def _generated(self, work: Work) -> None:
        """Of an evaluation nothing is kept but the score."""
        response = packed(work)
        finished = trajectory(work, self._context.index, response)
        generated = Generated(finished, work.evaluation)
        if work.evaluation:
            self._context.channel.send(generated)
            return
        if self._scoring.graded_elsewhere(work) and work.episode is not None:
            generated.home, generated.figures = work.partial.home, work.episode.figures(time.time())
        self._context.channel.send_after(self._payloads.append(response), partial(_stored, generated))

    def lost(self, work: Work, reason: str) -> None:
        """It is granted anew, to whomever."""
        logger.warning("trajectory %d (attempt %d) is lost: %s", work.trajectory_id, work.attempt, reason)
        lost = Lost(work.trajectory_id, work.attempt, reason, work.evaluation, work.ungraded)
        self._context.channel.send(lost)

    def hand_over(self, left: Iterable[Work], reason: str) -> None:
        """They go on elsewhere from what is known of them; an evaluation's begin again."""
        for work in left:
            if work.evaluation:
                self.lost(work, reason)
            else:
                self._context.channel.send(Unfinished(work.trajectory_id, work.attempt, work.so_far))


def _stored(generated: Generated, place: Place) -> Generated:
    generated.trajectory.place = place
    return generated
