"""One inference engine with continuous batching, advanced analytically from event to event instead of step by
step.

All running requests gain one token per decode step, so a request ends at a fixed place on the replica's own
axis of steps; a sorted list of these places gives the next completion. Between events the number of requests
is constant and their KV grows linearly, so the time of s steps is a quadratic in s and both directions have
closed forms. Steps are real numbers.
"""

import math
from array import array
from bisect import insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from laminar_hpc.simulator.cost import EngineCosts
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest

EPSILON = 1e-7  # steps; closer completions count as one
INFINITY = math.inf


@dataclass(slots=True, eq=False, repr=False)
class SimulatedReplica:
    """`capacity` and all KV in tokens. `site`: where the replica is, 0 = beside the trainer. `grace`: seconds
    from the notice that it is taken away until it is. `state` names what an empty replica waits for, under
    which its idle seconds are booked."""

    index: int
    costs: EngineCosts
    capacity: float
    max_concurrent: int
    admission: EngineAdmission
    gpus: int
    mtbf: float | None = None
    site: int = 0
    grace: float = 0.0
    full: float = field(init=False)
    clock: float = 0.0
    steps: float = 0.0
    # seconds of a decode step by its requests, as far as there were so many: without their KV, and at least
    bare: "array[float]" = field(default_factory=lambda: array("d"))
    least: "array[float]" = field(default_factory=lambda: array("d"))
    kv: float = 0.0
    parked_kv: float = 0.0
    running: dict[int, SimulatedRequest] = field(default_factory=dict)  # by ticket, in order of admission
    # (steps at its end, ticket) of each running request, in order; and of some that have left
    ends: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    away: dict[int, SimulatedRequest] = field(default_factory=dict)  # with their environments
    parked: dict[int, SimulatedRequest] = field(default_factory=dict)  # of those, the ones with KV here
    prompts: set[int] = field(default_factory=set)  # groups whose prompt is in the prefix cache
    stall_until: float = 0.0
    stall_kind: str = "prefill"
    target: float = INFINITY  # steps at the next event
    tickets: int = 0
    event: int = 0  # the newest in the clock, which makes earlier ones void; so with `pulls`
    pulls: int = 0
    pending: int = 0  # unfinished trajectories that belong here, on their way ones included
    weight_step: int = 0
    weight_id: int = 0
    visitors: int = 0  # moves on their way here
    state: str = "weights"
    seconds: dict[str, float] = field(default_factory=dict)
    kv_seconds: float = 0.0
    generated: float = 0.0
    prefilled: float = 0.0
    request_seconds: float = 0.0
    preemptions: int = 0
    ratio: float = field(init=False)  # of the admission, as it was set at `ratio_steps`
    ratio_steps: float = 0.0
    spans: list[tuple[str, float, float]] | None = None

    def __post_init__(self) -> None:
        self.full = self.capacity * (1 - 1e-9)
        self.ratio = self.admission.start

    # ---- time ----------------------------------------------------------------------------------------------

    def curve(self, requests: int) -> "tuple[array[float], array[float]]":
        """`bare` and `least` up to so many requests."""
        for n in range(len(self.bare), requests + 1):
            self.bare.append(self.costs.at(n))
            self.least.append(self.costs.least(n))
        return self.bare, self.least

    def _now(self) -> tuple[float, float, float]:
        """Seconds of the next step if that is not the least, by how much each one takes longer than that
        before, and the least."""
        n, kv_token = len(self.running), self.costs.kv_token
        bare, least = self.curve(n)
        return bare[n] + kv_token * self.kv, kv_token * n, least[n]

    def seconds_of(self, steps: float) -> float:
        """Time of the next `steps` decode steps with the present requests."""
        (first_step, slope, least), fixed = self._now(), 0.0
        if first_step < least:  # until the KV has grown
            first = min(steps, (least - first_step) / slope) if slope else steps
            fixed, steps, first_step = first * least, steps - first, least
        return fixed + steps * (first_step + slope * steps / 2)

    def steps_in(self, seconds: float) -> float:
        """Inverse of `seconds_of`."""
        (first_step, slope, least), steps = self._now(), 0.0
        if first_step < least:
            first = (least - first_step) / slope if slope else INFINITY
            if seconds <= first * least:
                return seconds / least
            steps, seconds, first_step = first, seconds - first * least, least
        return steps + 2 * seconds / (first_step + math.sqrt(first_step * first_step + 2 * slope * seconds))

    def advance(self, now: float, at_event: bool = False) -> None:
        """Moves the state to time `now`; with `at_event` exactly to the steps that `next_time` aimed at."""
        if now <= self.clock and not at_event:
            return
        if self.stall_until > self.clock:
            stall = min(now, self.stall_until) - self.clock
            self.kv_seconds += self.kv * stall
            self._book(self.stall_kind, stall)
        rest = now - self.clock
        n = len(self.running)
        if n and (rest > 0 or at_event) and now >= self.stall_until:
            steps = self.target - self.steps if at_event else self.steps_in(rest)
            grown = n * steps
            self.kv_seconds += (self.kv + grown / 2) * rest
            self.request_seconds += n * rest
            self.generated += grown
            self.kv += grown
            self.steps = self.target if at_event else self.steps + steps
            self._book("generate", rest)
        elif rest > 0:
            self._book(self.state, rest)

    def _book(self, kind: str, seconds: float) -> None:
        start = self.clock
        self.clock = self.clock + seconds
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        if self.spans is not None and seconds > 0:
            kind = "generate" if kind == "prefill" else kind
            if self.spans and self.spans[-1][0] == kind and start - self.spans[-1][2] < 1e-6:
                self.spans[-1] = (kind, self.spans[-1][1], self.clock)
            else:
                self.spans.append((kind, start, self.clock))

    def next_time(self) -> float:
        """When a request ends or the KV is full, unless something comes from outside; sets `target`."""
        running, ends, steps = self.running, self.ends, self.steps
        if not running:
            return INFINITY
        while ends[0][1] not in running:
            del ends[0]
        target = ends[0][0]
        if len(running) > 1 or self.parked_kv:
            full = steps + (self.capacity - self.kv - self.parked_kv) / len(running)
            target = full if full < target else target
        self.target = target if target > steps else steps
        start = self.clock if self.clock > self.stall_until else self.stall_until
        return start + self.seconds_of(self.target - steps)

    # ---- requests ------------------------------------------------------------------------------------------

    def reserve(self) -> float:
        """Tokens that are kept free for the growth of each running request."""
        a = self.admission
        ratio = self.ratio - (self.steps - self.ratio_steps) * (a.start - a.ratio_min) / a.steps
        return max(1.0, (ratio if ratio > a.ratio_min else a.ratio_min) * a.clip)

    def occupied(self) -> int:
        """Places of `max_concurrent` that are taken: by running requests, and by those on their way here."""
        taken = self.pending - len(self.waiting) - len(self.away)
        return taken if taken > len(self.running) else len(self.running)

    @property
    def place_free(self) -> bool:
        """One that asks now need not wait for a place."""
        return len(self.running) + len(self.waiting) < self.max_concurrent

    def fill(self) -> None:
        """Admits waiting requests while their KV and some growth fit; their prefill holds up decoding."""
        if not self.waiting:
            return
        if not self.running:
            self.ratio = self.admission.start
            self.ratio_steps = self.steps
        tokens = seconds = 0.0
        reserve, running, waiting = self.reserve(), self.running, self.waiting
        clip, longest = self.admission.clip, self.admission.longest
        places = self.max_concurrent - self.occupied()
        while waiting and places > 0:
            request = waiting[0]
            growth = longest - request.turns[request.turn] + request.remaining
            growth = growth if growth < clip else clip
            need = self.kv + request.context + reserve * len(running) + (growth if growth > 1.0 else 1.0)
            if running and need > self.capacity:
                break
            while self.parked and need + self.parked_kv > self.capacity:
                self._evict()
            waiting.popleft()
            places -= 1
            uncached = self._admit(request)
            if uncached:
                tokens += uncached
                seconds += self.costs.prefill(request.context, request.context - uncached)
        if tokens:
            self.prefilled += tokens
            if self.stall_until <= self.clock:
                self.stall_kind = "prefill"
            self.stall_until = max(self.clock, self.stall_until) + seconds

    def _admit(self, request: SimulatedRequest) -> float:
        """Starts decoding it; gives the tokens to prefill."""
        uncached = request.uncached
        group = request.group
        if (
            group is not None
            and uncached == request.context
            and request.turn == 0
            and request.remaining == request.turns[0]
        ):
            request.started = self.clock
            if group.group_id in self.prompts:
                # an earlier sample of the group has left the prompt in the prefix cache
                uncached = 0.0 if request.play is None else float(request.play.course.opening)
            self.prompts.add(group.group_id)
        if (play := request.play) is not None and play.placed is None:
            play.placed = self.clock
        self.kv += request.context
        request.offset = request.context - self.steps
        request.end = end = self.steps + request.remaining
        request.ticket = self.tickets = ticket = self.tickets + 1
        request.uncached = 0.0
        self.running[ticket] = request
        insort(self.ends, (end, ticket))
        return uncached

    def stop(self, request: SimulatedRequest) -> None:
        """Takes a running request out; its fields hold the present again."""
        del self.running[request.ticket]
        request.context = request.offset + self.steps
        remaining = request.end - self.steps
        request.remaining = remaining if remaining > 0.0 else 0.0
        self.kv = self.kv - request.context if self.running else 0.0

    def _evict(self) -> None:
        request = self.parked.pop(next(iter(self.parked)))
        request.uncached = request.context
        self.parked_kv = self.parked_kv - request.context if self.parked else 0.0

    def pop_finished(self) -> list[SimulatedRequest]:
        """Requests whose turn has ended by now, out of the batch."""
        done = []
        ends, running, steps = self.ends, self.running, self.steps
        last = steps + EPSILON
        while ends and ends[0][0] <= last:
            request = running.pop(ends.pop(0)[1], None)
            if request is not None:
                request.context = context = request.offset + steps
                request.remaining = 0.0
                self.kv -= context
                done.append(request)
        if not running:
            self.kv = 0.0
        return done

    def make_room(self) -> None:
        """At the KV limit: parked KV goes first, then requests go back to the queue and will be prefilled
        again; the rest of the batch tells how much growth is expected from now on."""
        order: list[SimulatedRequest] = []
        newest_back = self.admission.newest_back
        while len(self.running) + len(self.parked) > 1 and self.kv + self.parked_kv >= self.full:
            if self.parked:
                self._evict()
                continue
            if newest_back:
                request = self.running[next(reversed(self.running))]
                self.waiting.appendleft(request)
            else:
                # last: generated least
                order = order or sorted(
                    self.running.values(), key=lambda r: (r.end - r.turns[r.turn], r.ticket)
                )
                request = order.pop()
                self.waiting.append(request)
            self.stop(request)
            request.uncached = request.context
            self.preemptions += 1
        if order:
            generated = sum(
                r.turns[r.turn] - r.end + self.steps + self.admission.retract_steps for r in order
            )
            self.ratio = min(1.0, generated / (self.admission.longest * len(order)))
            self.ratio_steps = self.steps

    def park(self, request: SimulatedRequest) -> None:
        """Its turn is over and the environment works; the KV stays while there is room."""
        self.parked[request.trajectory_id] = request
        self.parked_kv += request.context

    def unpark(self, request: SimulatedRequest) -> None:
        if self.parked.pop(request.trajectory_id, None) is not None:
            self.parked_kv = self.parked_kv - request.context if self.parked else 0.0

    def take(self, trajectories: Collection[int], keep_kv: bool) -> list[SimulatedRequest]:
        """These trajectories, but parked ones, out of the replica, running first; without `keep_kv` they
        prefill again."""
        running, waiting = self.running.values(), self.waiting
        taken = [request for request in running if request.trajectory_id in trajectories]
        for request in taken:
            self.stop(request)
        taken += [request for request in waiting if request.trajectory_id in trajectories]
        self.waiting = deque(request for request in waiting if request.trajectory_id not in trajectories)
        if not keep_kv:
            for request in taken:
                request.uncached = request.context
        if not self.running:
            self.ends.clear()
            self.prompts.clear()
        return taken

    def take_all(self, keep_kv: bool) -> list[SimulatedRequest]:
        """All but parked requests out of the replica, running first; without `keep_kv` all prefill again."""
        taken = list(self.running.values())
        for request in taken:
            self.stop(request)
        taken += self.waiting
        if not keep_kv:
            for request in taken:
                request.uncached = request.context
            while self.parked:
                self._evict()
        self.waiting.clear()
        self.ends.clear()
        self.prompts.clear()
        return taken
