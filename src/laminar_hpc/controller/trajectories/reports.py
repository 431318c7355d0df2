"""What rollouts report of trajectories: generated, scored, lost, or so far. For evaluations the same messages
go to controller/trajectories/evaluations.py."""

import logging
import time

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.controller.trajectories.failover import Failover
from laminar_hpc.controller.trajectories.groups import Group
from laminar_hpc.controller.trajectories.homes import HomeRouting
from laminar_hpc.controller.trajectories.rewards import RewardErrors
from laminar_hpc.controller.trajectories.scorers import Scorers
from laminar_hpc.line.messages.data import Sample
from laminar_hpc.line.messages.rollouts import Drop, Generated, Increment, Lost, Scored
from laminar_hpc.machine.observability import console
from laminar_hpc.policies import filtering
from laminar_hpc.store.payload.reader import is_sound

log = logging.getLogger(__name__)
_PROGRESS_SECONDS = 5.0


class TrajectoryReports:
    """The handlers of Generated, Increment, Scored and Lost."""

    def __init__(self, tables: Tables, failover: Failover, scorers: Scorers, homes: HomeRouting) -> None:
        self._shared = tables
        self._tracker = tables.tracker
        self._evaluations = tables.evaluations
        self._pool = tables.pool
        self._failover = failover
        self._scorers = scorers
        self._homes = homes
        self.reward_errors = RewardErrors(tables.config, tables.say)
        self._refused = False  # it was said that a request of an agent was
        self._last_progress = 0.0

    def on_generated(self, member: Member, generated: Generated) -> None:
        trajectory = generated.trajectory
        if generated.evaluation:
            if self._evaluations:
                self._evaluations.generated(generated)
        elif not is_sound(trajectory.place) or not trajectory.digest or trajectory.length < 1:
            reason = f"{member.name} names no place where its response is"
            self.on_lost(member, Lost(trajectory.trajectory_id, trajectory.attempt, reason))
        elif (scorer := self._homes.grader(generated) if generated.home else member.hello.index) is None:
            reason = "the replica with its environment was lost"
            self.on_lost(member, Lost(trajectory.trajectory_id, trajectory.attempt, reason))
        else:
            trajectory.replica = scorer
            if self._tracker.generated(trajectory, self._shared.state.trainer_step):
                if generated.home:
                    self._homes.grades(generated)
                self._failover.trajectory_ended(trajectory.trajectory_id)

    def on_increment(self, _: Member, increment: Increment) -> None:
        if self._tracker.owners.counts_as(increment.trajectory_id, increment.attempt):
            self._pool.add(increment)

    def on_lost(self, _: Member, lost: Lost) -> None:
        log.warning("trajectory %d, attempt %d, was lost: %s", lost.trajectory_id, lost.attempt, lost.reason)
        if lost.evaluation:
            if self._evaluations:
                self._evaluations.lost(lost)
            return
        self._scorers.scored(lost.trajectory_id)
        if self._tracker.lost(lost.trajectory_id, lost.attempt):
            self._tracker.counts.tokens_discarded += self._failover.trajectory_ended(lost.trajectory_id)
            if lost.ungraded:
                self._ungraded(lost)
        fields = {"trajectory_id": lost.trajectory_id, "attempt": lost.attempt, "reason": lost.reason}
        self._shared.metrics.write("lost", **fields)

    def _ungraded(self, lost: Lost) -> None:
        """Nothing ungraded is trained. Ends the run, with a checkpoint, when a whole batch of groups was."""
        tracker, shared = self._tracker, self._shared
        group = tracker.ungraded(lost, time.time())
        if group is None:
            return
        for trajectory_id, sample in group.samples.items():
            tracker.counts.tokens_discarded += self._failover.trajectory_ended(trajectory_id)
            self._scorers.scored(trajectory_id)
            owner = None if sample.replica is None else shared.members.at("rollout", sample.replica)
            if owner is not None:
                shared.outbox.send(owner, Drop([Sample(trajectory_id, sample.attempt)]))
        fields = {"group_id": group.group_id, "prompt_index": group.prompt_index}
        shared.metrics.write("given_up", **fields, reason=filtering.ungraded(lost.reason))
        in_a_row = tracker.ungraded_in_a_row
        if filtering.environments_fail(in_a_row, shared.config.algorithm.prompts_per_step):
            last = f"the last because {lost.reason}"
            text = f"the last {in_a_row} groups had no grade, {last}; mend the environment"
            shared.fail(text, "every environment fails")

    # ---- scores --------------------------------------------------------------------------------------------

    def on_scored(self, _: Member, scored: Scored) -> None:
        self._watch_reward(scored)
        if scored.evaluation:
            if self._evaluations:
                self._evaluation_scored(self._evaluations, scored)
            return
        self._scorers.scored(scored.trajectory_id)
        group = self._tracker.scored(
            scored.trajectory_id, scored.attempt, scored.reward, scored.parts, scored.error, scored.time
        )
        if group is not None and not group.finished:
            self._group_given_up(group)

    def _watch_reward(self, scored: Scored) -> None:
        """A whole batch of failures ends the run: at once if nothing was trained, else with a checkpoint."""
        if scored.error:
            log.warning("reward of trajectory %d: %s", scored.trajectory_id, scored.error)
            if not self.reward_errors.count:
                where = {"trajectory_id": scored.trajectory_id, "evaluation": scored.evaluation}
                self._shared.metrics.write("reward_error", text=scored.error, **where)
        if scored.refused and not self._refused:
            self._refused = True
            of = f"trajectory {scored.trajectory_id}"
            self._shared.metrics.write("refused", trajectory_id=scored.trajectory_id, text=scored.refused)
            text = f"a request was refused, the first one in {of}: {scored.refused}"
            self._shared.say(console.line("agent", text))
        if why := self.reward_errors.take(scored):
            if not self._shared.state.steps_done:
                raise LaminarError(why)
            self._shared.fail(why, "every reward fails")

    def _group_given_up(self, group: Group) -> None:
        """It is without advantage. Ends the run, with a checkpoint, when only such groups come for long."""
        reason = filtering.reason([s.reward for s in group.samples.values()])
        self._shared.metrics.write(
            "given_up", group_id=group.group_id, prompt_index=group.prompt_index, reason=reason
        )
        in_a_row = self._tracker.filtered_in_a_row
        if filtering.exhausted(in_a_row, self._shared.config.algorithm.prompts_per_step):
            text = (
                f"the last {in_a_row} groups were all filtered, the last because {reason}: nothing can be "
                "learned from these prompts now; take easier or harder ones, check reward.function, or set "
                "algorithm.zero_variance=keep"
            )
            self._shared.fail(text, "every group is filtered")

    # ---- evaluations ---------------------------------------------------------------------------------------

    def _evaluation_scored(self, evaluations: Evaluations, scored: Scored) -> None:
        complete, state = evaluations.scored(scored), self._shared.state
        if complete is None:
            return
        for result in evaluations.results(complete, time.time()):
            self._shared.say(console.evaluation_line(self._shared.metrics.write("evaluation", **result)))
        state.finished = state.finished or (state.trainer_done and not evaluations.queue)

    def show_progress(self) -> None:
        """Now and then, how far a long evaluation is."""
        now = time.time()
        for e in self._evaluations.queue if self._evaluations else []:
            if e.scored and now - max(e.started, self._last_progress) > _PROGRESS_SECONDS:
                self._last_progress = now
                self._shared.say(console.evaluation_progress(e.name, e.label, e.scored, e.responses))
