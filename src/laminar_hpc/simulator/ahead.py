"""How far a replica may go on by itself: until somebody else looks at it, or one of its requests concerns
somebody else. What happens to it in between needs no events of its own on the clock.

Where a group is on one replica as a whole and nothing fails, a request that ends concerns others only as the
last of its group, or of its replica. What others do to a replica that generates, they do at times that are
known before: looks and arrivals of repack, samples, the end of a trainer step.
"""

import heapq
from collections.abc import Callable

from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.replica import EPSILON, SimulatedReplica
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.trainer import Trainer


class Appointments:
    """When somebody else comes to the replicas that generate."""

    def __init__(
        self, clock: Clock, trainer: Trainer, setup: SimulationSetup, quota: Callable[[int], int]
    ) -> None:
        """`quota`: groups that may still be granted on the weights of a step."""
        self._clock = clock
        self._trainer = trainer
        self._quota = quota
        self._times: list[float] = []
        self._looks: list[float] = []
        self._granted_at = -1  # the step at which it was seen that no more is granted
        fails = setup.trainer_mtbf or any(kind.mtbf for kind in setup.engines)
        scored_later = setup.several or setup.job.score
        self._known = setup.rules.refresh == "drained" and not fails and not scored_later

    def add(self, time: float) -> None:
        heapq.heappush(self._times, time)

    def add_look(self, time: float) -> None:
        """A look of repack, at nobody where admission grants no more."""
        self._looks.append(time)

    def _first(self, times: list[float], end: float) -> float:
        while times and times[0] < self._clock.now:
            heapq.heappop(times)
        return times[0] if times and times[0] < end else end

    def next(self, replica: SimulatedReplica) -> float:
        """No one comes to it before this time; not later than now where that is not known."""
        if not self._known or replica.visitors:
            return 0.0
        trainer = self._trainer
        end = self._first(self._times, trainer.ends_after(self._clock.now))
        if self._granted_at != trainer.step and self._quota(trainer.step) == 0:
            self._granted_at = trainer.step
        # quotas grow with the steps of weights, and none is newer before the step ends
        return end if self._granted_at == trainer.step else self._first(self._looks, end)


def concerns_others(replica: SimulatedReplica) -> bool:
    """Whether the next event, which `next_time` has found, can be the last end of a group or of the replica,
    or one of a group that is elsewhere too."""
    ends, last = replica.ends, replica.target + EPSILON
    if ends[0][0] > last:
        return False  # the KV is full
    if len(ends) > 1 and ends[1][0] <= last:
        return True  # several may end
    group = replica.running[ends[0][1]].group
    return group.unfinished == 1 or group.scattered or len(replica.running) == 1


def decode_alone(
    r: SimulatedReplica, until: float, now: float | None = None
) -> list[tuple[float, SimulatedRequest]]:
    """`next_time`, `advance` and `pop_finished` of a replica again and again, the same numbers in less time:
    over ends of single requests before `until` that are not the last of their group, while nothing waits and
    the KV is not full. Gives (time, request) of each. `now`: the time of the first, as `next_time` gave it.
    """
    done: list[tuple[float, SimulatedRequest]] = []
    if r.waiting or r.parked_kv or r.stall_until > r.clock or r.spans is not None:
        return done
    ends, running, capacity, full = r.ends, r.running, r.capacity, r.full
    kv, steps, clock, kv_token = r.kv, r.steps, r.clock, r.costs.kv_token
    decoded, n = r.seconds.get("generate", 0.0), len(running)
    kv_seconds, request_seconds, generated = r.kv_seconds, r.request_seconds, r.generated
    bare, leasts = r.curve(n)
    while n > 1 and kv < full:
        while (request := running.get(ends[0][1])) is None:
            del ends[0]
        end, ticket = ends[0]
        if end > steps + (capacity - kv) / n or end < steps or ends[1][0] <= end + EPSILON:
            break
        group = request.group
        if group.unfinished == 1 or group.scattered or (now is not None and end != r.target):
            break
        left = end - steps
        grown = n * left
        if now is None:
            first_step, slope, fixed, least = bare[n] + kv_token * kv, kv_token * n, 0.0, leasts[n]
            if first_step < least:
                first = min(left, (least - first_step) / slope) if slope else left
                fixed, left, first_step = first * least, left - first, least
            time = clock + (fixed + left * (first_step + slope * left / 2))
        else:
            time, now = now, None
        if time >= until:
            break
        rest = time - clock
        kv_seconds += (kv + grown / 2) * rest
        request_seconds += n * rest
        generated += grown
        kv, steps, clock, decoded = kv + grown, end, clock + rest, decoded + rest
        del running[ticket], ends[0]
        n -= 1
        kv -= request.offset + steps
        group.unfinished -= 1
        done.append((time, request))
    if done:
        r.kv, r.steps, r.clock, r.seconds["generate"] = kv, steps, clock, decoded
        r.kv_seconds, r.request_seconds, r.generated = kv_seconds, request_seconds, generated
        r.pending -= len(done)
    return done
