"""Groups that are granted or finished and not yet trained, and what became of all trajectories; the
simulator's experience buffer."""

from collections import Counter

from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.simulator.request import Request
from laminar_hpc.simulator.workload import Workload


class Group:
    """`requests` until all are finished; from then on `finished`: response tokens and weight step of each."""

    __slots__ = (
        "finished",
        "group_id",
        "number",
        "order",
        "prompt_tokens",
        "requests",
        "unfinished",
        "weight_step",
    )

    def __init__(self, group_id: int, number: int, weight_step: int, prompt_tokens: int) -> None:
        self.group_id, self.number, self.weight_step, self.prompt_tokens = (
            group_id,
            number,
            weight_step,
            prompt_tokens,
        )
        self.requests: list[Request] = []
        self.finished: list[tuple[int, int]] = []
        self.unfinished = self.order = 0

    def view(self) -> GroupView:
        finished = not self.unfinished
        return GroupView(self.group_id, self.number, self.weight_step, finished, self.order)


class TrajectoryTracker:
    """`counted` groups are granted and not given up. Trajectories of dead replicas wait in `lost` and are
    given out first."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.live: dict[int, Group] = {}
        self.views = LiveGroups()
        self.lost: list[Request] = []
        self.counted = self.order = self.trajectories = 0
        self.finished_tokens = self.discarded_tokens = 0.0
        self.consumed_tokens = 0
        self.consumed_trajectories = 0
        self.generation_staleness: Counter[int] = Counter()
        self.training_staleness: Counter[int] = Counter()
        self.versions = 0
        self.moved = 0

    def new_group(self, weight_step: int) -> Group:
        draw = self.workload.group(self.counted)
        self.counted += 1
        group = Group(self.counted - 1, self.counted, weight_step, draw.prompt_tokens)
        for turns, waits in zip(draw.turns, draw.waits, strict=True):
            group.requests.append(
                Request(self.trajectories, group, turns, waits, draw.prompt_tokens, weight_step)
            )
            self.trajectories += 1
        group.unfinished = len(group.requests)
        self.live[group.group_id] = group
        self.views.put(group.view())
        return group

    def take_lost(self, count: int, weight_step: int) -> list[Request]:
        """At most `count` of the lost, for a replica with weights of this step: none goes on with older ones
        than it began with, which a distant place may have."""
        taken = [request for request in self.lost if request.weight_step <= weight_step][:count]
        if taken:
            gone = set(map(id, taken))
            self.lost = [request for request in self.lost if id(request) not in gone]
        return taken

    def finish(self, request: Request, trainer_step: int) -> bool:
        """A trajectory is complete; True when its group is."""
        group = request.group
        group.unfinished -= 1
        self.finished_tokens += sum(request.turns)
        self.generation_staleness[trainer_step - request.weight_step] += 1
        self.versions = max(self.versions, request.versions)
        self.moved += request.moves
        if group.unfinished:
            return False
        group.finished = [(sum(r.turns), r.weight_step) for r in group.requests]
        group.requests = []  # a buffer that grows holds many groups
        self.order += 1
        group.order = self.order
        self.views.put(group.view())
        return True

    def consume(self, group_ids: list[int], step: int) -> list[int]:
        """Takes groups out for step `step`; gives the tokens of each trajectory, prompt included."""
        tokens = []
        for group_id in group_ids:
            group = self.live.pop(group_id)
            self.views.remove(group_id)
            for response_tokens, weight_step in group.finished:
                tokens.append(response_tokens + group.prompt_tokens)
                self.training_staleness[step - weight_step] += 1
            self.consumed_trajectories += len(group.finished)
        self.consumed_tokens += sum(tokens)
        return tokens
