"""Changes of hands: who generates a trajectory, and who scores a complete response; every change goes into
the store in the same turn.

An attempt number guards each trajectory: a report with an old one is refused, so a process that wakes up late
can do no harm. Called by the parts that move, rescue and reattach trajectories, and that have responses
scored; what becomes of a group says controller/trajectories/tracker.py.
"""

import logging

from laminar_hpc.controller.trajectories.group_table import GroupTable
from laminar_hpc.controller.trajectories.groups import Counts, SampleState
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.line.messages.rollouts import ScoreOrder
from laminar_hpc.store.rows import Rows

log = logging.getLogger(__name__)


class Ownership:
    """Of the trajectories of `groups`; refused reports and discarded tokens go into `counts`."""

    def __init__(self, groups: GroupTable, rows: Rows, counts: Counts) -> None:
        self._groups = groups
        self._rows = rows
        self._counts = counts
        self.unscored: dict[int, None] = {}  # complete, and nobody is asked for their scores; oldest first

    # ---- attempts ------------------------------------------------------------------------------------------

    def reported(self, trajectory_id: int, attempt: int) -> SampleState | None:
        """The sample a report speaks of; a report from an attempt that no longer counts is refused."""
        sample = self._groups.unfinished(trajectory_id, attempt)
        if sample is None:
            self._counts.reports_refused += 1
            text = "a report on trajectory %d, attempt %d, was refused: it no longer counts"
            log.warning(text, trajectory_id, attempt)
        return sample

    def counts_as(self, trajectory_id: int, attempt: int) -> bool:
        """Whether this attempt is under way; asked of increments, which may come late and mean nothing."""
        sample = self._groups.unfinished(trajectory_id, attempt)
        return sample is not None and not sample.generated

    # ---- who generates -------------------------------------------------------------------------------------

    def move(self, trajectory_id: int, attempt: int, replica: int, weight_id: int) -> bool:
        """`replica` owns it from here on, under the next attempt. False when this attempt is out of date."""
        sample = self.reported(trajectory_id, attempt)
        if sample is None or sample.generated:
            return False
        sample.owned_by(replica)
        sample.weight_id = weight_id
        self._groups.changed(trajectory_id)
        self._rows.grant_again(trajectory_id, sample.attempt, replica, weight_id, sample.weight_step)
        return True

    def regrant(self, attempts: dict[int, int], replica: int, weight_id: int) -> list[PromptGroup]:
        """As `move`, of trajectories and attempts without an owner: their groups, with the samples that still
        count."""
        by_group: dict[int, list[int]] = {}
        for trajectory_id, attempt in attempts.items():
            if self.move(trajectory_id, attempt, replica, weight_id):
                by_group.setdefault(self._groups.group_of(trajectory_id).group_id, []).append(trajectory_id)
        return [self._groups.message(self._groups[group_id], ids) for group_id, ids in by_group.items()]

    def adopt(self, trajectory_id: int, attempt: int, replica: int) -> None:
        """`replica` went on with what nobody else got: it owns it again, if this attempt is open."""
        sample = self._groups.unfinished(trajectory_id, attempt)
        if sample is not None and sample.is_open:
            sample.replica = replica
            self._groups.changed(trajectory_id)

    def hold(self, trajectory_id: int) -> None:
        """Its owner is dead; it is not given out before a move or grant takes it elsewhere, or `discard`."""
        sample = self._groups.sample(trajectory_id)
        sample.replica = None
        sample.held = True
        self._groups.changed(trajectory_id)

    def discard(self, trajectory_id: int, attempt: int, tokens: int) -> None:
        """It starts again from its prompt; `tokens` of it that were known are thrown away."""
        sample = self.reported(trajectory_id, attempt)
        if sample is not None and not sample.generated:
            self._counts.tokens_discarded += tokens
            sample.replica = None
            sample.held = False
            self._groups.changed(trajectory_id)

    # ---- who scores ----------------------------------------------------------------------------------------

    def scorer_lost(self, trajectory_id: int) -> None:
        """The replica that was to score it is gone."""
        self._groups.sample(trajectory_id).replica = None
        self.unscored[trajectory_id] = None
        self._groups.changed(trajectory_id)

    def scores(self, replica: int, scoring: list[Sample]) -> None:
        """`replica` scores these; what else it was to score is for others."""
        for scored in scoring:
            sample = self._groups.unfinished(scored.trajectory_id, scored.attempt)
            if sample is not None and sample.generated:
                sample.replica = replica
                self.unscored.pop(scored.trajectory_id, None)
                self._groups.changed(scored.trajectory_id)
        known = {sample.trajectory_id for sample in scoring}
        for trajectory_id in self._groups.holders.scoring(replica):
            if trajectory_id not in known:
                self.scorer_lost(trajectory_id)

    def score_at(self, trajectory_id: int, replica: int) -> ScoreOrder:
        """`replica` is to score an unscored response from here on; what to tell it."""
        del self.unscored[trajectory_id]
        sample = self._groups.sample(trajectory_id)
        sample.replica = replica
        self._groups.changed(trajectory_id)
        place = self._rows.place(trajectory_id)
        return ScoreOrder(trajectory_id, sample.attempt, self._groups.bare(trajectory_id), place)
