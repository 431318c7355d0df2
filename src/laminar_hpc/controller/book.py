"""The controller's memory of what is granted, generated, scored and lost; every change goes into the store in the same turn.

Owns group and trajectory states. An attempt number guards each trajectory: a report with an old one is refused, so a process that wakes up
late can do no harm. A lost sample is given out again before anything new, keeps its group's admission number, and may run on newer weights.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from laminar_hpc.controller.prompts import Prompt
from laminar_hpc.controller.store import Store
from laminar_hpc.messages import PromptGroup, Sample, Trajectory
from laminar_hpc.policies.admission import GroupView

log = logging.getLogger(__name__)


@dataclass
class SampleState:
    attempt: int
    weight_step: int
    replica: int  # -1 = with nobody, waits to be given out again
    finished: bool = False
    generated: Trajectory | None = None  # complete but not yet scored


@dataclass
class Group:
    group_id: int
    prompt_index: int
    number: int
    samples: dict[int, SampleState] = field(default_factory=dict)
    finished: bool = False
    finish_order: int = 0

    def view(self) -> GroupView:
        return GroupView(self.group_id, self.number, min(s.weight_step for s in self.samples.values()), self.finished, self.finish_order)


class Book:
    """Groups that are granted or finished; consumed ones leave it and stay in the store."""

    def __init__(self, store: Store, prompts: list[Prompt], samples_per_prompt: int, prompt_of_draw: Callable[[int], int]) -> None:
        self._store, self._prompts, self._samples, self._prompt_of_draw = store, prompts, samples_per_prompt, prompt_of_draw
        _, self._next_group, self._next_trajectory = store.next_ids()
        self._draws = store.get("prompts_drawn", 0)
        self._finished_count = store.get("groups_finished", 0)
        self.counted = store.counted_groups()
        self.groups: dict[int, Group] = {}
        self._group_of: dict[int, int] = {}
        self.refused_reports = 0
        self.discarded_tokens = 0

    def load(self) -> None:
        """After a restart: finished work is there again, work in progress starts again from its prompt under a new attempt."""
        for group_id, prompt_index, state, weight_step, number, order in self._store.live_groups():
            group = Group(group_id, prompt_index, number, finished=state == "finished", finish_order=order)
            for trajectory_id, attempt, sample_state, sample_step in self._store.samples_of(group_id):
                finished = sample_state == "finished"
                group.samples[trajectory_id] = SampleState(attempt, sample_step if finished else weight_step, -1, finished)
                self._group_of[trajectory_id] = group_id
            self.groups[group_id] = group

    # ---- giving out ------------------------------------------------------------------------------------------------------------

    def _lost_samples(self) -> list[tuple[Group, list[int]]]:
        lost = [
            (g, [i for i, s in g.samples.items() if not s.finished and s.replica < 0 and s.generated is None])
            for g in self.groups.values()
            if not g.finished
        ]
        return [(g, ids) for g, ids in lost if ids]

    def draw(self, most_groups: int, quota: int, replica: int, weight_id: int, weight_step: int, now: float) -> list[PromptGroup]:
        """A local batch for `replica`: samples that were lost first, then at most `quota` new groups; `most_groups` in all."""
        batch = []
        for group, ids in self._lost_samples()[:most_groups]:
            for trajectory_id in ids:
                sample = group.samples[trajectory_id]
                sample.attempt, sample.replica, sample.weight_step = sample.attempt + 1, replica, weight_step
                self._store.grant_again(trajectory_id, sample.attempt, replica, weight_id, weight_step)
            self._store.set_group_weights(group.group_id, group.view().weight_step)
            batch.append(self._message(group, ids))
        for _ in range(min(most_groups - len(batch), quota)):
            batch.append(self._new_group(replica, weight_id, weight_step, now))
        return batch

    def _new_group(self, replica: int, weight_id: int, weight_step: int, now: float) -> PromptGroup:
        self.counted += 1
        group = Group(self._next_group, self._prompt_of_draw(self._draws), self.counted)
        self._next_group += 1
        self._draws += 1
        self._store.put("prompts_drawn", self._draws)
        self._store.add_group(group.group_id, group.prompt_index, weight_id, weight_step, group.number, now)
        for index in range(self._samples):
            group.samples[self._next_trajectory] = SampleState(0, weight_step, replica)
            self._group_of[self._next_trajectory] = group.group_id
            self._store.add_trajectory(self._next_trajectory, group.group_id, index, replica, weight_id, weight_step)
            self._next_trajectory += 1
        self.groups[group.group_id] = group
        return self._message(group, list(group.samples))

    def _message(self, group: Group, ids: list[int]) -> PromptGroup:
        prompt = self._prompts[group.prompt_index]
        return PromptGroup(group.group_id, prompt.tokens, prompt.text, prompt.row, [Sample(i, group.samples[i].attempt) for i in ids])

    # ---- reports ---------------------------------------------------------------------------------------------------------------

    def _sample(self, trajectory_id: int, attempt: int) -> tuple[Group, SampleState] | None:
        """The sample a report speaks of, or None when the report is from an attempt that no longer counts."""
        group = self.groups.get(self._group_of.get(trajectory_id, -1))
        sample = group.samples.get(trajectory_id) if group else None
        if group is None or sample is None or sample.attempt != attempt or sample.finished:
            self.refused_reports += 1
            log.warning("a report on trajectory %d, attempt %d, was refused: it no longer counts", trajectory_id, attempt)
            return None
        return group, sample

    def generated(self, trajectory: Trajectory, trainer_step: int) -> None:
        found = self._sample(trajectory.trajectory_id, trajectory.attempt)
        if found:
            trajectory.step_finished = trainer_step
            found[1].generated = trajectory

    def scored(self, trajectory_id: int, attempt: int, reward: float, parts: dict[str, float], error: str, time: float) -> bool:
        """Stores the finished trajectory; True when its group is complete now."""
        found = self._sample(trajectory_id, attempt)
        if not found or found[1].generated is None:
            return False
        group, sample = found
        trajectory = sample.generated
        assert trajectory is not None
        trajectory.reward, trajectory.reward_parts, trajectory.reward_error, trajectory.time_scored = reward, parts, error, time
        self._store.finish_trajectory(trajectory, parts.get("accuracy", float(reward > 0)))
        sample.finished, sample.generated = True, None
        if all(s.finished for s in group.samples.values()):
            self._finished_count += 1
            group.finished, group.finish_order = True, self._finished_count
            self._store.put("groups_finished", self._finished_count)
            self._store.finish_group(group.group_id, group.view().weight_step, self._finished_count, time)
        return group.finished

    def lost(self, trajectory_id: int, attempt: int) -> None:
        """The sample is given out again at the next grant."""
        found = self._sample(trajectory_id, attempt)
        if found:
            self._release(found[1])

    def replica_gone(self, replica: int) -> int:
        """All that a dead replica had not finished is given out again; returns how many trajectories that are."""
        gone = [s for g in self.groups.values() for s in g.samples.values() if s.replica == replica and not s.finished]
        for sample in gone:
            self._release(sample)
        return len(gone)

    def _release(self, sample: SampleState) -> None:
        if sample.generated is not None:
            self.discarded_tokens += len(sample.generated.response_tokens)
        sample.replica, sample.generated = -1, None

    # ---- training --------------------------------------------------------------------------------------------------------------

    def views(self) -> list[GroupView]:
        return [g.view() for g in self.groups.values()]

    def consume(self, group_ids: list[int], step: int) -> list[Trajectory]:
        """Takes groups out for step `step`; they are in the store as consumed before the batch is sent."""
        self._store.consume(group_ids, step)
        for group_id in group_ids:
            for trajectory_id in self.groups.pop(group_id).samples:
                del self._group_of[trajectory_id]
        return self._store.trajectories(group_ids)
