"""The groups that are granted or finished, in memory, with their prompts; consumed ones leave it and stay in
the store.

Owns what is kept beside them: who has which trajectory (ownership_index.py), and what the policies see
(policies/live_groups.py). Who changes a group or a sample says so here: `add`, `changed`, `forget`.
"""

from collections.abc import Iterator, Mapping

from laminar_hpc.controller.trajectories.groups import Group, SampleState
from laminar_hpc.controller.trajectories.ownership_index import OwnershipIndex
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.policies.live_groups import LiveGroups


class GroupTable(Mapping[int, Group]):
    """Maps ids to groups."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self._groups: dict[int, Group] = {}
        self._group_of: dict[int, int] = {}  # by trajectory
        self.live = LiveGroups()
        self.holders = OwnershipIndex()

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    # ---- what happens --------------------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """A group, or more of its samples."""
        self._groups[group.group_id] = group
        self.live.put(group.view())
        for trajectory_id in group.samples:
            self._group_of[trajectory_id] = group.group_id
            self.holders.note(group, trajectory_id)

    def changed(self, trajectory_id: int) -> None:
        """The state or the owner of a sample."""
        self.holders.note(self.group_of(trajectory_id), trajectory_id)

    def forget(self, group_id: int) -> None:
        """It is trained or given up."""
        group = self._groups.pop(group_id)
        self.live.remove(group_id)
        self.holders.forget(group)
        for trajectory_id in group.samples:
            del self._group_of[trajectory_id]

    # ---- trajectories --------------------------------------------------------------------------------------

    def group_of(self, trajectory_id: int) -> Group:
        """Of a trajectory that is here."""
        return self._groups[self._group_of[trajectory_id]]

    def sample(self, trajectory_id: int) -> SampleState:
        """Of a trajectory that is here."""
        return self.group_of(trajectory_id).samples[trajectory_id]

    def unfinished(self, trajectory_id: int, attempt: int) -> SampleState | None:
        """This very attempt, unless it no longer counts."""
        sample = self.sample(trajectory_id) if trajectory_id in self._group_of else None
        return sample if sample and sample.attempt == attempt and not sample.finished else None

    def owner(self, trajectory_id: int) -> tuple[int | None, int]:
        """(replica, attempt) of a trajectory without its last token; (None, -1) of any other."""
        sample = self.sample(trajectory_id) if trajectory_id in self._group_of else None
        if sample is None or sample.finished or sample.generated:
            return None, -1
        return sample.replica, sample.attempt

    # ---- prompts -------------------------------------------------------------------------------------------

    def prompt_of(self, group: Group) -> Prompt:
        return self._prompts[group.prompt_index]

    def row(self, prompt_index: int) -> dict:
        """Of a prompt, also where no group of it is left here."""
        return self._prompts[prompt_index].row

    def message(self, group: Group, ids: list[int]) -> PromptGroup:
        """Its prompt with these of its samples, as it goes out."""
        prompt = self.prompt_of(group)
        samples = [Sample(i, group.samples[i].attempt, group.samples[i].ungraded) for i in ids]
        return PromptGroup(group.group_id, prompt.tokens, prompt.text, prompt.row, samples)

    def bare(self, trajectory_id: int) -> PromptGroup:
        """The prompt of its group, without samples."""
        return self.message(self.group_of(trajectory_id), [])
