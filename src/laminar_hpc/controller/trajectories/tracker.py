"""The controller's memory of what is granted, generated, scored and lost; every change goes into the store in
the same turn.

Owns group and trajectory states; changes of hands are those of ownership.py. A lost sample is given out again
before anything new, keeps its group's admission number, and may run on newer weights. A complete response is
stored at once and never generated again; whoever scores it, the first score counts. A group whose samples are
all scored is finished, gets more samples (policies.sampling), or is given up (policies.filtering).
"""

from collections.abc import Callable

from laminar_hpc.controller.trajectories.group_table import GroupTable
from laminar_hpc.controller.trajectories.groups import Counts, Group, SampleState
from laminar_hpc.controller.trajectories.ownership import Ownership
from laminar_hpc.controller.trajectories.upcoming import Upcoming
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.data import PromptGroup, Sample, ScorePart, Trajectory
from laminar_hpc.line.messages.rollouts import Lost
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.policies import filtering
from laminar_hpc.policies.dispatch import DrawOrder, ExpectedLengths
from laminar_hpc.policies.live_groups import GroupView
from laminar_hpc.policies.metrics import accuracy
from laminar_hpc.policies.remaining import RemainingLengths
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store.store import Store


class TrajectoryTracker:
    """`groups`: those that are granted or finished; `owners`: whose their trajectories are; `lengths`: of the
    responses that have ended, none longer than `longest` tokens."""

    def __init__(
        self,
        store: Store,
        prompts: list[Prompt],
        size: GroupSize,
        prompt_of_draw: Callable[[int], int],
        filters: bool = False,
        longest: int = 0,
        block: int = 1,
    ) -> None:
        """`block`: see policies/dispatch.py."""
        self._store = store
        self._rows = store.rows
        self._prompts = prompts
        self._size = size
        self._prompt_of_draw = prompt_of_draw
        self._filters = filters
        _, self._next_group, self._next_trajectory = store.next_ids()
        self._expected = ExpectedLengths()
        self.upcoming = Upcoming(store, DrawOrder(self._expected, prompt_of_draw, len(prompts), block))
        self._finished_count = store.get("groups_finished", 0)
        self.counted = self._rows.counted_groups()
        self.counts = Counts()
        self.lengths = RemainingLengths(longest)
        self.groups = GroupTable(prompts)
        self.owners = Ownership(self.groups, self._rows, self.counts)
        self.filtered_in_a_row = self.ungraded_in_a_row = 0
        # a score can make room for other groups, or for more samples
        self.may_change = filters or size.first < size.limit

    def recover(self) -> None:
        """When the controller starts: finished work is there again, complete responses wait for somebody to
        score them, and work in progress starts again from its prompt under a new attempt."""
        self._load(None)
        for prompt_index, lengths in self._rows.lengths_of_groups():
            self._expected.finished(prompt_index, lengths)

    def keep_owners(self) -> set[int]:
        """After `recover`, where replicas may have outlived the last controller: work in progress stays with
        those whom the store names. Which replicas that are."""
        owners = self._rows.owners()
        for trajectory_id, replica, weight_step in owners:
            sample = self.groups.sample(trajectory_id)
            sample.replica = replica
            sample.weight_step = weight_step
            self.owners.unscored.pop(trajectory_id, None)
            self.groups.changed(trajectory_id)
            self.groups.live.put(self.groups.group_of(trajectory_id).view())
        return {replica for _, replica, _ in owners}

    def restore(self, step: int) -> int:
        """When trainers start on the weights of step `step`: what later steps trained on waits again, in
        memory and in the store. How many groups that is.

        All else stays: what is granted or generated with its owner, admission numbers, the order of
        finishing, prompts drawn.
        """
        groups = self._rows.restore(step)
        self._load(groups)
        return len(groups)

    def _load(self, ids: list[int] | None) -> None:
        """Groups as the store has them; None: all that are granted or finished."""
        for group_id, prompt_index, state, weight_step, number, order in self._rows.live_groups(ids):
            group = Group(group_id, prompt_index, number, finished=state == "finished", finish_order=order)
            for sample in self._rows.samples_of(group_id):
                trajectory_id, attempt, sample_state, weight_id, step, reward, accuracy, length = sample
                finished, generated = sample_state == "finished", sample_state == "generated"
                step = step if finished or generated else weight_step
                outcome = (finished, generated, reward, accuracy, length, weight_id)
                group.samples[trajectory_id] = SampleState(attempt, step, None, False, *outcome)
                if generated:
                    self.owners.unscored[trajectory_id] = None
            self.groups.add(group)

    # ---- giving out ----------------------------------------------------------------------------------------

    @property
    def open_in_groups(self) -> float:
        """Samples with nobody, counted as groups of their first samples."""
        return self.groups.holders.open_samples / self._size.first

    def groups_in(self, trajectories: int) -> int:
        """New groups that come to so many trajectories at first; one at least."""
        return max(1, trajectories // self._size.first)

    def oldest_open(self) -> GroupView | None:
        """The first group of which `draw` gives out samples."""
        group_id = self.groups.holders.oldest_open()
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
        while room > 0 and (group_id := self.groups.holders.oldest_open()) is not None:
            group, ids = self.groups[group_id], self.groups.holders.open_of(group_id)
            if not may_go_on(group.view()):
                break
            room -= len(ids)
            for trajectory_id in ids:
                sample = group.samples[trajectory_id]
                sample.owned_by(replica)
                sample.weight_id = weight_id
                sample.weight_step = weight_step
                self._rows.grant_again(trajectory_id, sample.attempt, replica, weight_id, weight_step)
                self.groups.changed(trajectory_id)
            self.groups.live.put(group.view())
            self._rows.set_group_weights(group.group_id, group.view().weight_step)
            batch.append(self.groups.message(group, ids))
        new = range(min(-(-room // self._size.first), quota))
        batch += [self._new_group(replica, weight_id, weight_step, now, groups_max) for _ in new]
        if new:
            self.upcoming.save()
        return batch

    def ahead(self, replica: int, groups: int) -> list[tuple[dict, int]]:
        """The rows of so many groups that `replica` will get next, and the samples of each at first."""
        draws = self.upcoming.keep(replica, groups)
        self.upcoming.save()
        rows = [self._prompts[self._prompt_of_draw(draw)].row for draw in draws]
        return [(row, self._size.first) for row in rows]

    def _new_group(
        self, replica: int, weight_id: int, weight_step: int, now: float, local_batch: int
    ) -> PromptGroup:
        self.counted += 1
        draw = self.upcoming.take(replica, local_batch)
        group = Group(self._next_group, self._prompt_of_draw(draw), self.counted)
        self._next_group += 1
        self._rows.add_group(group.group_id, group.prompt_index, weight_id, weight_step, group.number, now)
        self._rows.add_prompt(group.group_id, self._prompts[group.prompt_index].tokens)
        self._add_samples(group, self._size.first, replica, weight_id, weight_step)
        self.groups.add(group)
        return self.groups.message(group, list(group.samples))

    def _add_samples(
        self, group: Group, count: int, replica: int | None, weight_id: int, weight_step: int
    ) -> None:
        ids = range(self._next_trajectory, self._next_trajectory + count)
        self._next_trajectory += count
        where = (replica, weight_id, weight_step)
        self._rows.add_trajectories(ids, group.group_id, len(group.samples), *where)
        group.samples.update({i: SampleState(0, weight_step, replica, weight_id=weight_id) for i in ids})

    # ---- reports -------------------------------------------------------------------------------------------

    def generated(self, trajectory: Trajectory, trainer_step: int) -> bool:
        """Stores the response; its replica is to score it. Whether it counts: the first that comes does. The
        step of its weights is what it was granted on."""
        sample = self.owners.reported(trajectory.trajectory_id, trajectory.attempt)
        if sample is None or sample.generated:
            return False
        trajectory.step_finished = trainer_step
        trajectory.weight_step = sample.weight_step
        self._rows.store_response(trajectory)
        sample.generated = True
        sample.replica = trajectory.replica
        sample.held = False
        sample.length = trajectory.length
        self.lengths.add(trajectory.length)
        sample.weight_id = trajectory.weight_id
        self.groups.changed(trajectory.trajectory_id)
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
        sample = self.owners.reported(trajectory_id, attempt)
        if sample is None or not sample.generated:
            return None
        group = self.groups.group_of(trajectory_id)
        sample.reward = reward
        sample.accuracy = accuracy(reward, parts)
        self._rows.finish_trajectory(trajectory_id, ScorePart(time, reward, parts, error), sample.accuracy)
        sample.finished = True
        sample.generated = False
        self.owners.unscored.pop(trajectory_id, None)
        self.groups.changed(trajectory_id)
        if not all(s.finished for s in group.samples.values()):
            return None
        more = self._size.granted_next([s.accuracy for s in group.samples.values()])
        if more:
            self._add_samples(group, more, None, sample.weight_id, group.view().weight_step)
            self.groups.add(group)
            return None
        self._complete(group, time)
        return group

    def _complete(self, group: Group, time: float) -> None:
        """All samples are scored and there shall be no more."""
        rewards = [sample.reward for sample in group.samples.values()]
        lengths = [sample.length for sample in group.samples.values()]
        self._expected.finished(group.prompt_index, lengths)
        samples, tokens = self._size.saved(lengths)
        self.counts.tokens_generated += sum(lengths)
        self.counts.samples_saved += samples
        self.counts.tokens_saved += tokens
        self.ungraded_in_a_row = 0
        if self._filters and filtering.zero_variance(rewards):
            self.counts.groups_filtered += 1
            self.filtered_in_a_row += 1
            self.counted -= 1
            self._rows.give_up_group(group.group_id, filtering.reason(rewards), time)
            self.groups.forget(group.group_id)
            return
        self.filtered_in_a_row = 0
        self._finished_count += 1
        group.finished = True
        group.finish_order = self._finished_count
        self.groups.live.put(group.view())
        self._store.put("groups_finished", self._finished_count)
        self._rows.finish_group(group.group_id, group.view().weight_step, self._finished_count, time)

    def lost(self, trajectory_id: int, attempt: int) -> bool:
        """The sample is given out again at the next grant, also one whose response is complete and cannot be
        read. Whether the report counts."""
        sample = self.owners.reported(trajectory_id, attempt)
        if sample is None:
            return False
        if sample.generated:
            self.owners.unscored.pop(trajectory_id, None)
            self._rows.lose_response(trajectory_id)
        sample.replica = None
        sample.held = False
        sample.generated = False
        self.groups.changed(trajectory_id)
        return True

    def unreadable(self, samples: list[Sample], groups: list[int]) -> list[Sample]:
        """Of a batch of these groups, which is not trained: its samples whose responses cannot be read are
        given out again, the rest of it waits. Those of `samples` that count."""
        lost = self._rows.take_back(samples, groups)
        if lost:
            self._load(groups)
        return lost

    def ungraded(self, lost: Lost, time: float) -> Group | None:
        """Of a sample that is lost: its environment failed. Its group, when that was once too often: it is
        given up, with all of its samples, wherever they are, and its admission number is free."""
        group = self.groups.group_of(lost.trajectory_id)
        sample = group.samples[lost.trajectory_id]
        sample.ungraded += lost.ungraded
        if sample.ungraded < filtering.UNGRADED_LIMIT:
            return None
        self.ungraded_in_a_row += 1
        self.counted -= 1
        for each in group.samples:
            self.owners.unscored.pop(each, None)
        self._rows.give_up_group(group.group_id, filtering.ungraded(lost.reason), time)
        self.groups.forget(group.group_id)
        return group

    # ---- training ------------------------------------------------------------------------------------------

    @property
    def ready_groups(self) -> int:
        """Finished, not consumed."""
        return self.groups.live.finished

    def consume(self, group_ids: list[int], step: int) -> list[BatchGroup]:
        """Takes groups out for step `step`, consumed in the store before the batch is sent; returns them."""
        self._rows.consume(group_ids, step)
        for group_id in group_ids:
            self.groups.forget(group_id)
        return self._rows.batch(group_ids)
