"""Groups that are granted or finished and not yet trained, and what became of all trajectories; the
simulator's experience buffer."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from laminar_hpc.policies.dispatch import DrawOrder, ExpectedLengths
from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.turns.course import Course
from laminar_hpc.simulator.turns.environments import Play
from laminar_hpc.simulator.workload import Workload


@dataclass(slots=True, eq=False, repr=False)
class SimulatedGroup:
    """`requests` by trajectory id, until they are finished. `finished`, in the order of the ids from `first`
    on: response tokens and weight step of each. A buffer that grows holds many groups, hence the slots."""

    group_id: int
    number: int
    weight_step: int
    prompt_tokens: int
    first: int
    unfinished: int
    requests: dict[int, SimulatedRequest] = field(default_factory=dict)
    finished: list[tuple[int, int]] = field(init=False)
    order: int = 0
    scattered: bool = False  # a move has parted its samples

    def __post_init__(self) -> None:
        self.finished = [(0, 0)] * self.unfinished

    def view(self) -> GroupView:
        finished = not self.unfinished
        return GroupView(self.group_id, self.number, self.weight_step, finished, self.order)


class SimulatedTracker:
    """`counted` groups are granted, not given up. `lost`: of dead replicas, given out first."""

    def __init__(self, workload: Workload, dispatch: str = "in_order") -> None:
        self.workload = workload
        config, self._lengths = workload.config, ExpectedLengths()
        block = config.prompts_per_step if dispatch == "longest_first" and config.prompts else 1
        self._draws = DrawOrder(self._lengths, workload.prompt, max(1, config.prompts), block)
        # of a trajectory with several turns: (group, sample, course) -> what it has with its environment
        self.play: Callable[[int, int, Course], Play]
        # (time, tokens) of each response that has ended since repack looked; None: it looks at none
        self.lengths: list[tuple[float, int]] | None = None
        self.live: dict[int, SimulatedGroup] = {}
        self.views = LiveGroups()
        self.lost: list[SimulatedRequest] = []
        self.counted = 0
        self.order = 0
        self.trajectories = 0
        self.finished_tokens = 0.0
        self.discarded_tokens = 0.0
        self.generation_staleness: Counter[int] = Counter()
        self.training_staleness: Counter[int] = Counter()
        self.versions = 0
        self.ended = array("d")  # when each trajectory had its last token; of one replica in order
        self.latencies = array("d")  # seconds from its grant to then
        self.admitted_latencies = array("d")  # the same from its first admission to an engine

    def new_group(self, weight_step: int, local_batch: int = 1) -> SimulatedGroup:
        index = self._draws.take(local_batch)
        draw = self.workload.group(index)
        self.counted += 1
        number, prompt_tokens = self.trajectories, float(draw.prompt_tokens)
        group = SimulatedGroup(index, self.counted, weight_step, draw.prompt_tokens, number, len(draw.turns))
        for sample, turns in enumerate(draw.turns):
            play = self.play(group.group_id, sample, draw.courses[sample]) if draw.courses else None
            group.requests[number] = SimulatedRequest(number, group, turns, prompt_tokens, weight_step, play)
            number += 1
        self.trajectories = number
        self.live[group.group_id] = group
        self.views.put(group.view())
        return group

    def take_lost(self, count: int, weight_step: int) -> list[SimulatedRequest]:
        """At most `count` of the lost, for a replica with weights of this step: none goes on with older ones
        than it began with, which a distant place may have."""
        taken = [request for request in self.lost if request.weight_step <= weight_step][:count]
        if taken:
            gone = set(map(id, taken))
            self.lost = [request for request in self.lost if id(request) not in gone]
        return taken

    def finish(self, request: SimulatedRequest, trainer_step: int) -> bool:
        """A trajectory is complete; True when its group is."""
        group = request.group
        group.unfinished -= 1
        self._count([request], trainer_step)
        if group.unfinished:
            return False
        if self.workload.config.prompts:
            lengths = [tokens for tokens, _ in group.finished]
            self._lengths.finished(self.workload.prompt(group.group_id), lengths)
        self.order += 1
        group.order = self.order
        self.views.put(group.view())
        return True

    def ends(self, time: float, request: SimulatedRequest) -> None:
        """A trajectory has its last token."""
        self.ended.append(time)
        self.latencies.append(time - request.granted)
        self.admitted_latencies.append(time - request.started)
        if self.lengths is not None:
            self.lengths.append((time, request.turns[0] if request.play is None else request.play.tokens))

    def complete(self, done: list[tuple[float, SimulatedRequest]], trainer_step: int) -> None:
        """`ends` and `finish` of (time, request) with one turn, none of which is the last of its group; the
        group knows."""
        ended, latencies, admitted = self.ended, self.latencies, self.admitted_latencies
        for time, request in done:
            ended.append(time)
            latencies.append(time - request.granted)
            admitted.append(time - request.started)
        if self.lengths is not None:
            self.lengths += [(time, request.turns[0]) for time, request in done]
        self._count([request for _, request in done], trainer_step)

    def _count(self, requests: list[SimulatedRequest], trainer_step: int) -> None:
        """Complete trajectories in what is told of their groups, and of all."""
        staleness = self.generation_staleness
        for request in requests:
            group, turns, play, weight_step = request.group, request.turns, request.play, request.weight_step
            tokens, drawn = (turns[0], turns[0]) if play is None else (play.tokens, play.drawn)
            group.finished[request.trajectory_id - group.first] = tokens, weight_step
            del group.requests[request.trajectory_id]
            self.finished_tokens += drawn
            late = trainer_step - weight_step
            staleness[late] = staleness[late] + 1 if late in staleness else 1
            if request.versions > self.versions:
                self.versions = request.versions

    def consume(self, group_ids: list[int], step: int) -> list[int]:
        """Takes groups out for step `step`; gives the tokens of each trajectory, prompt included."""
        tokens = []
        for group_id in group_ids:
            group = self.live.pop(group_id)
            self.views.remove(group_id)
            prompt_tokens = group.prompt_tokens
            tokens += [response_tokens + prompt_tokens for response_tokens, _ in group.finished]
            weight_steps = [weight_step for _, weight_step in group.finished]
            for weight_step in set(weight_steps):
                self.training_staleness[step - weight_step] += weight_steps.count(weight_step)
        return tokens
