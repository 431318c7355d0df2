"""What a step is trained on: of the whole batch what every rank plans with, and the way to the responses that
a rank trains itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.store.payload.layout import Response, Tokens
from laminar_hpc.store.payload.whole import Whole, prompt_array


@dataclass(frozen=True)
class PlannedMicrobatch:
    """A trajectory as every rank knows it. `prompt` [tokens] int32, one for all of its group; `teacher` as in
    BatchGroup."""

    record: Trajectory
    prompt: Tokens
    teacher: str = ""

    @property
    def length(self) -> int:
        """Tokens that it takes up in a pack."""
        return len(self.prompt) + self.record.length - 1


@dataclass(frozen=True)
class StepBatch:
    """`planned`: ordered by group, the same on every rank. `read`: the responses of some of them, each as it
    was generated; collective, each rank names its own. Raises LaminarError on all ranks."""

    planned: list[PlannedMicrobatch]
    read: Callable[[Sequence[PlannedMicrobatch]], list[Response]]


def plan_of(groups: Sequence[BatchGroup]) -> list[PlannedMicrobatch]:
    """Ordered, because the order of arrival must not matter."""
    planned = [
        PlannedMicrobatch(t, prompt, g.teacher)
        for g in groups
        for prompt in [prompt_array(g)]
        for t in g.trajectories
    ]
    return sorted(planned, key=lambda p: (p.record.group_id, p.record.trajectory_id))


def in_memory(batch: Sequence[Whole]) -> StepBatch:
    """A batch whose responses are at hand."""
    found = {whole.record.trajectory_id: whole.response for whole in batch}
    planned = [PlannedMicrobatch(whole.record, whole.prompt) for whole in batch]
    planned.sort(key=lambda p: (p.record.group_id, p.record.trajectory_id))
    return StepBatch(planned, lambda wanted: [found[p.record.trajectory_id] for p in wanted])
