"""Dynamic repack (Laminar, section 4): replicas that hold the tail of their local batch are emptied into
others on the same weights, where the seconds that this frees are more than what the moves cost.

A decode step of n requests takes t(n) seconds, most of it the same whatever n is. A replica whose requests
will decode W tokens in all, the longest of them S, is busy for

    T = S' t(W / S'),   S' = max(S, W / n_max)

seconds, n_max being the requests that it can run at a time. Moving requests leaves the sum of W and changes
the sum of T over all replicas. That change is the gain, in seconds in which an emptied replica generates a
new local batch; with t(n) = a + b n it is a times the steps that nobody has to take any more. Requests wait
for no cost but theirs: a plan is carried out where gain > 2 x the measured seconds of a move, since the
source is not free before its end and both replicas work for it.

Requests that wait in a full engine have no KV yet; they go to replicas of the same weights that have room.

Invariants: a trajectory stays on its weights and moves at most once in a plan; no replica is both emptied and
filled; what a destination holds, grown as expected, stays within its KV cache and its requests; at most
`emptied_max` replicas, and SOURCES_MAX, are emptied; each transfer lowers the sum of T by more than its cost,
so plan after plan ends: nothing moves back and forth.

Pure: controller and simulator call `plan` every few seconds and after each publication.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

FIRST_MOVE_SECONDS = 2.0  # what a move is taken to cost before the first one has been measured
_DISTURBED = 2.0  # replicas that a move costs its time: source and destination
_PROBES = 8  # destinations at each end, the fullest and the emptiest, that are tried for one source
SOURCES_MAX = 64  # emptied by a plan, so that it takes a turn's time at any scale; the next one goes on
_FULL = 0.98  # share of the KV limit at which a destination takes nothing more


class RequestView(NamedTuple):
    """A trajectory that is generated, or waits in its engine. `kv_tokens`: of its prompt and response so far;
    `remaining`: response tokens that are still expected."""

    trajectory_id: int
    group_id: int
    kv_tokens: float
    remaining: float
    queued: bool = False


@dataclass(frozen=True)
class Transfer:
    """These trajectories of `source` go to `destination`; `empties`: with the plan's other transfers all go
    that it has."""

    source: int
    destination: int
    trajectories: tuple[int, ...]
    empties: bool = True


@dataclass(slots=True)
class Load:
    """Sums over requests: KV tokens, tokens that they will still get in all, and those of the longest."""

    requests: int = 0
    kv_tokens: float = 0.0
    work: float = 0.0
    longest: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.requests + other.requests,
            self.kv_tokens + other.kv_tokens,
            self.work + other.work,
            max(self.longest, other.longest),
        )

    @staticmethod
    def of(requests: Sequence[RequestView]) -> "Load":
        if not requests:
            return Load()
        _, _, kv, remaining, _ = zip(*requests, strict=True)  # by columns: a plan looks at thousands
        return Load(len(requests), sum(kv), sum(remaining), max(remaining))

    @property
    def kv_peak(self) -> float:
        """KV tokens at the expected maximum: of n requests with c tokens each and exponential remaining
        lengths of mean m, n e^(-s/m) are left after s steps with c + s tokens each; most at s = m - c."""
        if not self.requests:
            return 0.0
        held, grows = self.kv_tokens / self.requests, self.work / self.requests
        return self.kv_tokens if grows <= held else self.requests * grows * math.exp(held / grows - 1)


class ReplicaView(NamedTuple):
    """What the plan sees of a replica: sums, and `details`, which gives its requests when they are needed.
    `kv_tokens` counts what waits for a tool, too; `queued` requests wait in its engine. `load`: sums over the
    details, where these take longer."""

    replica: int
    weight_id: int
    kv_tokens: float
    requests: int
    details: Callable[[], Sequence[RequestView]]
    queued: int = 0
    load: Callable[[], Load] | None = None


@dataclass(frozen=True)
class EngineLimits:
    """`curve`: (requests, seconds per decode step), ascending; () = every step takes one second. `kv_tokens`:
    C_max; `requests`: B. `prefills`: what moves is prefilled again."""

    kv_tokens: float
    requests: int
    curve: Sequence[tuple[int, float]] = ()
    prefills: bool = False

    def step(self, requests: float) -> float:
        """Seconds of a decode step, by linear interpolation; beyond the curve it grows in proportion."""
        curve = self.curve
        if not curve:
            return 1.0
        place = bisect_left(curve, requests, key=lambda point: point[0])
        if place == len(curve):
            return curve[-1][1] * max(1.0, requests / curve[-1][0])
        (n, seconds), (before, fast) = curve[place], curve[max(0, place - 1)]
        return seconds if n == before else fast + (seconds - fast) * (requests - before) / (n - before)

    def fits(self, load: Load) -> bool:
        return load.requests <= self.requests and load.kv_peak <= self.kv_tokens

    def drain(self, load: Load) -> float:
        """T: seconds until the last of these requests has ended."""
        if load.longest <= 0.0:
            return 0.0
        at_once = max(1.0, min(self.requests, self.kv_tokens * load.requests / max(1.0, load.kv_peak)))
        steps = max(load.longest, load.work / at_once)
        return steps * self.step(load.work / steps)


class MoveCosts:
    """What emptying a replica costs, from the run's own moves. Forced: nothing. `time_scale`: how many times
    faster than real ones emulated engines are."""

    def __init__(self, forced: bool = False, time_scale: float = 1.0) -> None:
        self._forced = forced
        self._time_scale = time_scale
        self._newest: deque[float] = deque(maxlen=64)

    def add(self, seconds: float) -> None:
        """A move has taken so long, beside others."""
        self._newest.append(seconds)

    def seconds(self, load: Load, limits: EngineLimits) -> float:
        """Of moving this load. A token that is prefilled again takes at most its share of a full step."""
        if self._forced:
            return 0.0
        prefill = load.kv_tokens * limits.step(limits.requests) / limits.requests if limits.prefills else 0.0
        move = fmean(self._newest) if self._newest else FIRST_MOVE_SECONDS / self._time_scale
        return _DISTURBED * move + prefill


def saturation_batch(flops: float, memory_bytes_per_second: float) -> int:
    """B: tokens per decode step at which reading the weights and computing take equally long (roofline; 295
    on an H800). In bf16 a parameter has 2 bytes, and a token costs 2 FLOPs of it."""
    return int(flops / memory_bytes_per_second)


def plan(
    replicas: Iterable[ReplicaView], limits: EngineLimits, costs: MoveCosts, emptied_max: int
) -> list[Transfer]:
    """`emptied_max`: replicas that would find a new local batch."""
    groups: dict[int, list[ReplicaView]] = {}
    for each in replicas:
        if each.requests:
            groups.setdefault(each.weight_id, []).append(each)
    transfers: list[Transfer] = []
    for weight_id in sorted(groups):
        if len(groups[weight_id]) > 1:
            group = _Group(groups[weight_id], limits, costs)
            transfers += group.empty(emptied_max - len({t.source for t in transfers if t.empties}))
            transfers += group.level()
    return transfers


class PlannedReplica:
    """A replica while a plan is made. `kv_tokens`: that it holds; of one that was filled, that it is to hold.
    `count`: of its requests."""

    __slots__ = ("_requests", "count", "filled", "kv_tokens", "load", "view")

    def __init__(self, view: ReplicaView) -> None:
        self.view = view
        self.kv_tokens = view.kv_tokens
        self.count = view.requests
        self.filled = False
        self.load: Load | None = None
        self._requests: Sequence[RequestView] | None = None

    @property
    def requests(self) -> Sequence[RequestView]:
        """Those that it has before the plan, or was to keep."""
        if self._requests is None:
            self._requests = self.view.details()
        return self._requests

    def open(self) -> Load:
        """Its load; looks at its requests at the first call."""
        if self.load is None:
            self.load = self.view.load() if self.view.load else Load.of(self.requests)
            self.count = self.load.requests
        return self.load

    def keep(self, requests: Sequence[RequestView]) -> None:
        """These requests are all that it has."""
        self._requests = requests
        self.load = Load.of(requests)
        self.count = self.load.requests

    def fill(self, load: Load) -> None:
        """It is to take this load."""
        self.load = self.open() + load
        self.filled = True
        self.kv_tokens = self.load.kv_peak
        self.count = self.load.requests


_held = attrgetter("kv_tokens")
_Part = tuple[PlannedReplica, Sequence[RequestView], Load]  # what goes to a destination, and its load
_Rest = tuple[list[RequestView], Load]  # what stays at a source, and its load


def _queue_of(source: PlannedReplica) -> tuple[list[RequestView], list[Load]]:
    """The requests that wait in its engine, and loads of so many of the last ones."""
    queue = [request for request in source.requests if request.queued]
    loads = accumulate((Load.of([request]) for request in reversed(queue)), initial=Load())
    return queue, list(loads)


class _Group:
    """All replicas on one weight id."""

    def __init__(self, views: list[ReplicaView], limits: EngineLimits, costs: MoveCosts) -> None:
        self._limits = limits
        self._costs = costs
        self._places = [PlannedReplica(v) for v in sorted(views, key=attrgetter("kv_tokens", "replica"))]
        # fullest last; one that is full can take nothing, and is not worth emptying
        self._open = [place for place in self._places if not place.view.queued and self._has_room(place)]

    def _has_room(self, place: PlannedReplica) -> bool:
        return place.kv_tokens < _FULL * self._limits.kv_tokens and place.count < self._limits.requests

    def empty(self, emptied_max: int) -> Iterator[Transfer]:
        """Sources from the emptiest up, SOURCES_MAX at most."""
        emptied_max = min(emptied_max, SOURCES_MAX)
        for source in list(self._open):
            if emptied_max <= 0:
                return
            if source.filled or not self._roomy(source):
                continue
            parts = self._spread(source)
            if parts and self._gain(source, Load(), parts) > self._costs.seconds(source.open(), self._limits):
                emptied_max -= 1
                self._close(source)
                yield from self._fill(source, parts, empties=True)

    def _roomy(self, source: PlannedReplica) -> bool:
        """Whether the others could take it, by what is known without a look at the requests."""
        limit, free, places = self._limits, 0.0, 0
        for other in self._open:
            if other is not source:
                free += max(0.0, limit.kv_tokens - other.kv_tokens)
                places += max(0, limit.requests - other.count)
            if free >= source.kv_tokens and places >= source.view.requests:
                return True
        return False

    def _spread(self, source: PlannedReplica) -> Sequence[_Part]:
        """Where all of the source's requests go; [] where they don't fit. To one, the fullest, if it can take
        all of them; else the samples of a prompt stay together where they can. Tried are the fullest that
        have room for what the source holds, then the emptiest of all."""
        whole, limits = source.open(), self._limits
        end = bisect_right(self._open, limits.kv_tokens - whole.kv_tokens, key=_held)
        able = (
            place
            for place in (self._open[at] for at in range(end - 1, -1, -1))
            if place is not source and place.count + whole.requests <= limits.requests
        )
        emptiest = (place for place in self._open if place is not source)
        probed = list(dict.fromkeys([*islice(able, _PROBES), *islice(emptiest, _PROBES)]))
        for place in probed:
            if limits.fits(place.open() + whole):
                return [(place, source.requests, whole)]
        probed.sort(key=lambda place: -place.kv_tokens)
        if sum(max(0.0, limits.kv_tokens - place.open().kv_peak) for place in probed) < whole.kv_tokens:
            return []
        by_group = sorted(source.requests, key=lambda request: (request.group_id, request.trajectory_id))
        left = [list(bundle) for _, bundle in groupby(by_group, key=lambda request: request.group_id)]
        loads, taken = [place.open() for place in probed], [list[RequestView]() for _ in probed]
        for bundles in (left, None):  # whole prompts first, then each sample of what is left
            bundles = bundles or [[request] for bundle in left for request in bundle]
            left = []
            for load, bundle in sorted(
                ((Load.of(b), b) for b in bundles), key=lambda item: -item[0].kv_tokens
            ):
                for at in range(len(probed)):
                    # the sum is not made where the KV that is held already is too much
                    if loads[at].kv_tokens + load.kv_tokens > limits.kv_tokens:
                        continue
                    if limits.fits(grown := loads[at] + load):
                        loads[at] = grown
                        taken[at] += bundle
                        break
                else:
                    left.append(bundle)
        each = zip(probed, taken, strict=True)
        parts: list[_Part] = [(place, part, Load.of(part)) for place, part in each if part]
        return [] if left else parts

    def _gain(self, source: PlannedReplica, stays: Load, parts: Sequence[_Part]) -> float:
        """Seconds by which the sum of T falls; `stays`: of the source's load."""
        drain = self._limits.drain
        gain = drain(source.open()) - drain(stays)
        for place, _, load in parts:
            gain -= drain(place.open() + load) - drain(place.open())
        return gain

    def _fill(self, source: PlannedReplica, parts: Sequence[_Part], empties: bool) -> Iterator[Transfer]:
        for place, taken, load in parts:
            self._close(place)
            place.fill(load)
            if self._has_room(place):
                insort(self._open, place, key=_held)
            ids = tuple(request.trajectory_id for request in taken)
            yield Transfer(source.view.replica, place.view.replica, ids, empties)

    def _close(self, place: PlannedReplica) -> None:
        """Takes it out of the open ones, which stand in order of what they hold."""
        at = bisect_left(self._open, place.kv_tokens, key=_held)
        while self._open[at] is not place:
            at += 1
        del self._open[at]

    def level(self) -> Iterator[Transfer]:
        """Requests that wait in an engine go to replicas with room, the emptiest first."""
        for source in sorted((p for p in self._places if p.view.queued), key=lambda p: -p.view.queued):
            if not self._open:
                return
            (queue, loads), rests = _queue_of(source), dict[int, _Rest]()
            for place in list(self._open):
                count = 0  # of the queue's last
                while count < len(queue) and self._limits.fits(place.open() + loads[count + 1]):
                    count += 1
                if not count:
                    continue
                taken = queue[-count:][::-1]
                if count not in rests:  # the same for many places
                    gone = {request.trajectory_id for request in taken}
                    rest = [r for r in source.requests if r.trajectory_id not in gone]
                    rests[count] = rest, Load.of(rest)
                rest, stays = rests[count]
                parts = [(place, taken, loads[count])]
                if self._gain(source, stays, parts) > self._costs.seconds(Load(), self._limits):
                    yield from self._fill(source, parts, empties=False)
                    source.keep(rest)
                    (queue, loads), rests = _queue_of(source), {}
