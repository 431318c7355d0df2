"""The controller's memory of what is granted, generated, scored and lost; every change goes into the store in
the same turn.

Owns group and trajectory states. An attempt number guards each trajectory: a report with an old one is
refused, so a process that wakes up late can do no harm. A lost sample is given out again before anything new,
keeps its group's admission number, and may run on newer weights. A complete response is stored at once and
never generated again; whoever scores it, the first score counts. A group whose samples are all scored is
finished, gets more samples (policies.sampling), or is given up (policies.filtering).
"""

import logging
from collections.abc import Callable

from laminar_hpc.controller.groups import Counts, Group, SampleState
from laminar_hpc.controller.holders import Holders
from laminar_hpc.controller.store import Store
from laminar_hpc.controller.upcoming import Upcoming
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.messages.data import PromptGroup, Sample, ScorePart, Trajectory
from laminar_hpc.messages.rollouts import Lost, ScoreOrder
from laminar_hpc.messages.training import BatchGroup
from laminar_hpc.policies import filtering
from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.policies.metrics import accuracy
from laminar_hpc.policies.sampling import GroupSize

log = logging.getLogger(__name__)


class TrajectoryTracker:
    """Groups that are granted or finished; consumed ones leave it and stay in the store."""

    def __init__(
        self,
        store: Store,
        prompts: list[Prompt],
        size: GroupSize,
        prompt_of_draw: Callable[[int], int],
        filters: bool = False,
    ) -> None:
        self._store, self._prompts, self._size = store, prompts, size
        self._prompt_of_draw, self._filters = prompt_of_draw, filters
        _, self._next_group, self._next_trajectory = store.next_ids()
        self.upcoming = Upcoming(store)
        self._finished_count = store.get("groups_finished", 0)
        self.counted = store.counted_groups()
        self.groups: dict[int, Group] = {}
        self.live = LiveGroups()  # the same, as the policies see them
        self.holders = Holders()
        self._group_of: dict[int, int] = {}
        self.unscored: dict[int, None] = {}  # complete, and nobody is asked for their scores; oldest first
        self.filtered_in_a_row = self.ungraded_in_a_row = 0
        self.counts = Counts()
        # a score can make room for other groups, or for more samples
        self.may_change = filters or size.first < size.limit

    def recover(self) -> None:
        """When the controller starts: finished work is there again, complete responses wait for somebody to
        score them, and work in progress starts again from its prompt under a new attempt."""
        self._load(None)

    def keep_owners(self) -> set[int]:
        """After `recover`, where replicas may have outlived the last controller: work in progress stays with
        those whom the store names. Which replicas that are."""
        owners = self._store.owners()
        for trajectory_id, replica, weight_step in owners:
            sample = self.groups[self._group_of[trajectory_id]].samples[trajectory_id]
            sample.replica, sample.weight_step = replica, weight_step
            self.unscored.pop(trajectory_id, None)
            self._changed(trajectory_id)
            self.live.put(self.groups[self._group_of[trajectory_id]].view())
        return {replica for _, replica, _ in owners}

    def restore(self, step: int) -> int:
        """When trainers start on the weights of step `step`: what later steps trained on waits again, in
        memory and in the store. How many groups that is.

        All else stays: what is granted or generated with its owner, admission numbers, the order of
        finishing, prompts drawn.
        """
        groups = self._store.restore(step)
        self._load(groups)
        return len(groups)

    def _load(self, ids: list[int] | None) -> None:
        """Groups as the store has them; None: all that are granted or finished."""
        for group_id, prompt_index, state, weight_step, number, order in self._store.live_groups(ids):
            group = Group(group_id, prompt_index, number, finished=state == "finished", finish_order=order)
            for sample in self._store.samples_of(group_id):
                trajectory_id, attempt, sample_state, weight_id, step, reward, accuracy, length = sample
                finished, generated = sample_state == "finished", sample_state == "generated"
                step = step if finished or generated else weight_step
                outcome = (finished, generated, reward, accuracy, length, weight_id)
                group.samples[trajectory_id] = SampleState(attempt, step, None, False, *outcome)
                if generated:
                    self.unscored[trajectory_id] = None
            self._add(group)

    # ---- giving out ----------------------------------------------------------------------------------------

    @property
    def open_in_groups(self) -> float:
        """Samples with nobody, counted as groups of their first samples."""
        return self.holders.open_samples / self._size.first

    def oldest_open(self) -> GroupView | None:
        """The first group of which `draw` gives out samples."""
        group_id = self.holders.oldest_open()
        return None if group_id is None else self.groups[group_id].view()

    def draw(
        self,
        groups_max: int,
        quota: int,
        replica: int,
        weight_id: int,
        weight_step: int,
        now: float,
        may_go_on: Callable[[GroupView], bool] = lambda _: True,
    ) -> list[PromptGroup]:
        """A local batch for `replica`: samples that are with nobody first, of groups that `may_go_on`, then
        at most `quota` new groups. Groups on older weights come first; one that may not go on ends that, as
        admission.may_go_on refuses all younger ones too.

        It ends with the group that brings it to the samples of `groups_max` new groups.
        """
        batch, room = [], groups_max * self._size.first
        while room > 0 and (group_id := self.holders.oldest_open()) is not None:
            group, ids = self.groups[group_id], self.holders.open_of(group_id)
            if not may_go_on(group.view()):
                break
            room -= len(ids)
            for trajectory_id in ids:
                sample = group.samples[trajectory_id]
                sample.owned_by(replica)
                sample.weight_step = weight_step
                self._store.grant_again(trajectory_id, sample.attempt, replica, weight_id, weight_step)
                self.holders.note(group, trajectory_id)
            self.live.put(group.view())
            self._store.set_group_weights(group.group_id, group.view().weight_step)
            batch.append(self._message(group, ids))
        new = range(min(-(-room // self._size.first), quota))
        batch += [self._new_group(replica, weight_id, weight_step, now) for _ in new]
        if new:
            self.upcoming.save()
        return batch

    def ahead(self, replica: int, groups: int) -> list[tuple[dict, int]]:
        """The rows of so many groups that `replica` will get next, and the samples of each at first."""
        draws = self.upcoming.keep(replica, groups)
        self.upcoming.save()
        rows = [self._prompts[self._prompt_of_draw(draw)].row for draw in draws]
        return [(row, self._size.first) for row in rows]

    def _new_group(self, replica: int, weight_id: int, weight_step: int, now: float) -> PromptGroup:
        self.counted += 1
        draw = self.upcoming.take(replica)
        group = Group(self._next_group, self._prompt_of_draw(draw), self.counted)
        self._next_group += 1
        self._store.add_group(group.group_id, group.prompt_index, weight_id, weight_step, group.number, now)
        self._store.add_prompt(group.group_id, self._prompts[group.prompt_index].tokens)
        self._add_samples(group, self._size.first, replica, weight_id, weight_step)
        self._add(group)
        return self._message(group, list(group.samples))

    def _add_samples(
        self, group: Group, count: int, replica: int | None, weight_id: int, weight_step: int
    ) -> None:
        ids = range(self._next_trajectory, self._next_trajectory + count)
        self._next_trajectory += count
        where = (replica, weight_id, weight_step)
        self._store.add_trajectories(ids, group.group_id, len(group.samples), *where)
        group.samples.update({i: SampleState(0, weight_step, replica) for i in ids})

    def _message(self, group: Group, ids: list[int]) -> PromptGroup:
        prompt = self._prompts[group.prompt_index]
        samples = [Sample(i, group.samples[i].attempt) for i in ids]
        return PromptGroup(group.group_id, prompt.tokens, prompt.text, prompt.row, samples)

    # ---- reports -------------------------------------------------------------------------------------------

    def _unfinished(self, trajectory_id: int, attempt: int) -> SampleState | None:
        """This very attempt, unless it no longer counts."""
        group_id = self._group_of.get(trajectory_id)
        sample = None if group_id is None else self.groups[group_id].samples[trajectory_id]
        return sample if sample and sample.attempt == attempt and not sample.finished else None

    def _reported(self, trajectory_id: int, attempt: int) -> SampleState | None:
        """The sample a report speaks of; a report from an attempt that no longer counts is refused."""
        sample = self._unfinished(trajectory_id, attempt)
        if sample is None:
            self.counts.reports_refused += 1
            text = "a report on trajectory %d, attempt %d, was refused: it no longer counts"
            log.warning(text, trajectory_id, attempt)
        return sample

    def counts_as(self, trajectory_id: int, attempt: int) -> bool:
        """Whether this attempt is under way; asked of increments, which may come late without being a sign of
        anything."""
        sample = self._unfinished(trajectory_id, attempt)
        return sample is not None and not sample.generated

    def generated(self, trajectory: Trajectory, trainer_step: int) -> bool:
        """Stores the response; its replica is to score it. Whether it counts: the first that comes does. The
        step of its weights is what it was granted on."""
        sample = self._reported(trajectory.trajectory_id, trajectory.attempt)
        if sample is None or sample.generated:
            return False
        trajectory.step_finished, trajectory.weight_step = trainer_step, sample.weight_step
        self._store.store_response(trajectory)
        sample.generated, sample.replica, sample.held = True, trajectory.replica, False
        sample.length, sample.weight_id = trajectory.length, trajectory.weight_id
        self._changed(trajectory.trajectory_id)
        return True

    def scored(
        self,
        trajectory_id: int,
        attempt: int,
        reward: float,
        parts: dict[str, float],
        error: str,
        time: float,
    ) -> Group | None:
        """Stores the score; its group when that is complete now: `finished`, else it is given up."""
        sample = self._reported(trajectory_id, attempt)
        if sample is None or not sample.generated:
            return None
        group = self.groups[self._group_of[trajectory_id]]
        sample.reward, sample.accuracy = reward, accuracy(reward, parts)
        self._store.finish_trajectory(trajectory_id, ScorePart(time, reward, parts, error), sample.accuracy)
        sample.finished, sample.generated = True, False
        self.unscored.pop(trajectory_id, None)
        self._changed(trajectory_id)
        if not all(s.finished for s in group.samples.values()):
            return None
        more = self._size.granted_next([s.accuracy for s in group.samples.values()])
        if more:
            self._add_samples(group, more, None, sample.weight_id, group.view().weight_step)
            self._add(group)
            return None
        self._complete(group, time)
        return group

    def _complete(self, group: Group, time: float) -> None:
        """All samples are scored and there shall be no more."""
        rewards = [sample.reward for sample in group.samples.values()]
        lengths = [sample.length for sample in group.samples.values()]
        samples, tokens = self._size.saved(lengths)
        self.counts.tokens_generated += sum(lengths)
        self.counts.samples_saved += samples
        self.counts.tokens_saved += tokens
        if self._filters and filtering.zero_variance(rewards):
            self.counts.groups_filtered += 1
            self.filtered_in_a_row += 1
            self.counted -= 1
            self._store.give_up_group(group.group_id, filtering.reason(rewards), time)
            self._forget(group.group_id)
            return
        self.filtered_in_a_row = self.ungraded_in_a_row = 0
        self._finished_count += 1
        group.finished, group.finish_order = True, self._finished_count
        self.live.put(group.view())
        self._store.put("groups_finished", self._finished_count)
        self._store.finish_group(group.group_id, group.view().weight_step, self._finished_count, time)

    # ---- what is kept beside the groups --------------------------------------------------------------------

    @property
    def ready_groups(self) -> int:
        """Finished, not consumed."""
        return self.live.finished

    def _add(self, group: Group) -> None:
        """A group, or more of its samples."""
        self.groups[group.group_id] = group
        self.live.put(group.view())
        for trajectory_id in group.samples:
            self._group_of[trajectory_id] = group.group_id
            self.holders.note(group, trajectory_id)

    def _changed(self, trajectory_id: int) -> None:
        """The state or the owner of a sample."""
        self.holders.note(self.groups[self._group_of[trajectory_id]], trajectory_id)

    def _forget(self, group_id: int) -> None:
        group = self.groups.pop(group_id)
        self.live.remove(group_id)
        self.holders.forget(group)
        for trajectory_id in group.samples:
            del self._group_of[trajectory_id]

    # ---- scores by others ----------------------------------------------------------------------------------

    def scorer_lost(self, trajectory_id: int) -> None:
        """The replica that was to score it is gone."""
        self.groups[self._group_of[trajectory_id]].samples[trajectory_id].replica = None
        self.unscored[trajectory_id] = None
        self._changed(trajectory_id)

    def scores(self, replica: int, scoring: list[Sample]) -> None:
        """`replica` scores these; what else it was to score is for others."""
        for scored in scoring:
            sample = self._unfinished(scored.trajectory_id, scored.attempt)
            if sample is not None and sample.generated:
                sample.replica = replica
                self.unscored.pop(scored.trajectory_id, None)
                self._changed(scored.trajectory_id)
        known = {sample.trajectory_id for sample in scoring}
        for trajectory_id in self.holders.scoring(replica):
            if trajectory_id not in known:
                self.scorer_lost(trajectory_id)

    def score_at(self, trajectory_id: int, replica: int) -> ScoreOrder:
        """`replica` is to score an unscored response from here on; what to tell it."""
        del self.unscored[trajectory_id]
        sample = self.groups[self._group_of[trajectory_id]].samples[trajectory_id]
        sample.replica = replica
        self._changed(trajectory_id)
        place = self._store.place(trajectory_id)
        return ScoreOrder(trajectory_id, sample.attempt, self.bare_group(trajectory_id), place)

    # ---- moves ---------------------------------------------------------------------------------------------

    def prompt_of(self, group: Group) -> Prompt:
        return self._prompts[group.prompt_index]

    def bare_group(self, trajectory_id: int) -> PromptGroup:
        """Its group's prompt, without samples."""
        return self._message(self.groups[self._group_of[trajectory_id]], [])

    def move(self, trajectory_id: int, attempt: int, replica: int, weight_id: int) -> bool:
        """`replica` owns the trajectory from here on, under the next attempt. False when this attempt no
        longer counts."""
        sample = self._reported(trajectory_id, attempt)
        if sample is None or sample.generated:
            return False
        sample.owned_by(replica)
        self._changed(trajectory_id)
        self._store.grant_again(trajectory_id, sample.attempt, replica, weight_id, sample.weight_step)
        return True

    def regrant(self, attempts: dict[int, int], replica: int, weight_id: int) -> list[PromptGroup]:
        """As `move`, of trajectories and attempts without an owner: their groups, with the samples that still
        count."""
        by_group: dict[int, list[int]] = {}
        for trajectory_id, attempt in attempts.items():
            if self.move(trajectory_id, attempt, replica, weight_id):
                by_group.setdefault(self._group_of[trajectory_id], []).append(trajectory_id)
        return [self._message(self.groups[group_id], ids) for group_id, ids in by_group.items()]

    def owner(self, trajectory_id: int) -> tuple[int | None, int]:
        """(replica, attempt) of a trajectory without its last token; (None, -1) of any other."""
        group_id = self._group_of.get(trajectory_id)
        sample = None if group_id is None else self.groups[group_id].samples[trajectory_id]
        if sample is None or sample.finished or sample.generated:
            return None, -1
        return sample.replica, sample.attempt

    def adopt(self, trajectory_id: int, attempt: int, replica: int) -> bool:
        """`replica` has gone on with what nobody else was given meanwhile: it owns it again. Whether this
        very attempt is open."""
        sample = self._unfinished(trajectory_id, attempt)
        if sample is None or not sample.is_open:
            return False
        sample.replica = replica
        self._changed(trajectory_id)
        return True

    def hold(self, trajectory_id: int) -> None:
        """Its owner is dead; it is not given out before a move or a grant takes it elsewhere, or
        `discard`."""
        sample = self.groups[self._group_of[trajectory_id]].samples[trajectory_id]
        sample.replica, sample.held = None, True
        self._changed(trajectory_id)

    def discard(self, trajectory_id: int, attempt: int, tokens: int) -> None:
        """It starts again from its prompt; `tokens` of it that were known are thrown away."""
        sample = self._reported(trajectory_id, attempt)
        if sample is not None and not sample.generated:
            self.counts.tokens_discarded += tokens
            sample.replica, sample.held = None, False
            self._changed(trajectory_id)

    def lost(self, trajectory_id: int, attempt: int) -> bool:
        """The sample is given out again at the next grant, also one whose response is complete and cannot be
        read. Whether the report counts."""
        sample = self._reported(trajectory_id, attempt)
        if sample is None:
            return False
        if sample.generated:
            self.unscored.pop(trajectory_id, None)
            self._store.lose_response(trajectory_id)
        sample.replica, sample.held, sample.generated = None, False, False
        self._changed(trajectory_id)
        return True

    def ungraded(self, lost: Lost, time: float) -> Group | None:
        """Of a sample that is lost: its environment failed. Its group, when that was once too often: it is
        given up, with all of its samples, wherever they are, and its admission number is free."""
        group = self.groups[self._group_of[lost.trajectory_id]]
        sample = group.samples[lost.trajectory_id]
        sample.ungraded += lost.ungraded
        if sample.ungraded < filtering.UNGRADED_LIMIT:
            return None
        self.ungraded_in_a_row += 1
        self.counted -= 1
        for each in group.samples:
            self.unscored.pop(each, None)
        self._store.give_up_group(group.group_id, filtering.ungraded(lost.reason), time)
        self._forget(group.group_id)
        return group

    # ---- training ------------------------------------------------------------------------------------------

    def take_counts(self) -> Counts:
        taken, self.counts = self.counts, Counts()
        return taken

    def consume(self, group_ids: list[int], step: int) -> list[BatchGroup]:
        """Takes groups out for step `step`; they are in the store as consumed before the batch is sent. What
        goes out of them."""
        self._store.consume(group_ids, step)
        for group_id in group_ids:
            self._forget(group_id)
        return self._store.batch(group_ids)
