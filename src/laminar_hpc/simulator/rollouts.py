"""All replicas: grants by `policies.admission`, refresh of weights by the rules, environment turns. Moves and
failures: fleet_moves.py.

waits for                    booked under    unblocked by
quota                        admission       weights_available
the other replicas           barrier         the last one's drain
newer weights (barrier)      weights         weights_available
newer weights at its site    admission       arrived
the environment              environment     turns/events.py
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate

from laminar_hpc.policies import refill
from laminar_hpc.policies.failover import Room
from laminar_hpc.simulator.ahead import Appointments, concerns_others, decode_alone
from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.refilling import refill_beside
from laminar_hpc.simulator.replica import INFINITY, SimulatedReplica
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.tracker import SimulatedTracker
from laminar_hpc.simulator.trainer import Trainer
from laminar_hpc.simulator.turns.course import Course
from laminar_hpc.simulator.turns.environments import Play
from laminar_hpc.simulator.turns.events import TurnEvents
from laminar_hpc.simulator.wide_area.link import Deliveries

SLOTS = 3  # ids that a relay holds (relay.slots)
_ENDLESS = 1 << 40  # steps: the run is cut off at its last step, without a ramp-down of grants before it


class Rollouts:
    def __init__(
        self,
        clock: Clock,
        tracker: SimulatedTracker,
        trainer: Trainer,
        replicas: list[SimulatedReplica],
        setup: SimulationSetup,
        shares: list[float],
    ) -> None:
        """`shares`: of a batch, each replica's local batch, unless the setup says how large it is."""
        self.clock = clock
        self.tracker = tracker
        self.trainer = trainer
        self.replicas = replicas
        self.rules = setup.rules
        self.groups_per_step = groups = setup.workload.prompts_per_step
        # A local batch is ceil(G / replicas) groups; with unequal replicas the faster get more.
        given = setup.local_batch_groups
        self.local_batch = [given or max(1, math.ceil(groups * share - 1e-9)) for share in shares]
        self.granted_steps = setup.steps if setup.ends else _ENDLESS
        self.samples = tracker.workload.config.samples_per_prompt
        self.newest = 0  # step of the weights that the trainer's place has
        # steps whose weights the relays of each place hold; the first place is the trainer's
        self.several = self.rules.refresh == "versions"
        ring = refill.held(self.rules.whole_staleness or 0) if self.several else SLOTS
        self.slots = [deque([0], maxlen=ring) for _ in range(1 + len(setup.sites))]
        self.deliveries = Deliveries(clock, setup.sites, self.arrived)
        self.appointments = Appointments(clock, trainer, setup, self.quota)
        self.waiting_replicas: dict[int, None] = {}  # replicas that asked and got nothing; in order
        self.leaving: set[int] = set()  # they had a notice
        self.barrier: set[int] = set()
        self.down: set[int] = set()
        self.paused = False
        self.global_sync_seconds = max(replica.costs.global_sync for replica in replicas)
        # whether one that asks goes on with a dead one's trajectories
        self.rescue: Callable[[SimulatedReplica], bool] = lambda replica: False
        trainer.rollouts = self
        self.turns = TurnEvents(self, setup.environments())

    def play_of(self, index: int, sample: int, course: Course) -> Play:
        """What a sample of group `index` has with its environment."""
        again = partial(self.tracker.workload.course, index, sample)
        return self.turns.environments.play(course, again)

    def start(self) -> None:
        if self.rules.refresh == "barrier":
            self.barrier = {replica.index for replica in self.replicas}
            self.try_round()
        else:
            for replica in self.replicas:
                self.ask(replica)

    def gone(self, replica: SimulatedReplica) -> bool:
        """The replica is down, or has had its notice."""
        return replica.index in self.down or replica.index in self.leaving

    def held(self, replica: SimulatedReplica) -> Iterable[int]:
        """The ids of the weights that it can generate with."""
        return self.slots[replica.site] if self.several else (replica.weight_id,)

    def rooms(self, fits: Callable[[SimulatedReplica], bool] = lambda replica: True) -> list[Room]:
        """KV tokens that are free at the replicas that generate, stay and fit."""
        rooms = []
        for replica in self.replicas:
            if replica.pending and replica.state != "pull" and not self.gone(replica) and fits(replica):
                replica.advance(self.clock.now)
                held = replica.kv + replica.parked_kv + sum(q.context for q in replica.waiting)
                free = replica.capacity - held
                rooms += [Room(replica.index, weight_id, free) for weight_id in self.held(replica)]
        return rooms

    # ---- a replica's events --------------------------------------------------------------------------------

    def schedule(self, replica: SimulatedReplica) -> None:
        """Enters the replica's next event that concerns others; an earlier one becomes void. What comes
        before concerns it alone, and happens here."""
        alone_until = self.appointments.next(replica)
        self.pass_ends(replica, alone_until)
        self._enter(replica, alone_until)

    def _enter(self, replica: SimulatedReplica, alone_until: float) -> None:
        replica.event += 1
        while True:
            time = replica.next_time()
            if time >= alone_until or concerns_others(replica):
                break
            self.reach(replica, time)
            replica.fill()
            self.pass_ends(replica, alone_until)
        if time < INFINITY:
            self.clock.at(time, self.on_event, replica, replica.event)

    def pass_ends(self, replica: SimulatedReplica, alone_until: float, now: float | None = None) -> bool:
        """Gets past ends that concern nobody else, the first one at `now`; whether there are any."""
        if alone_until <= self.clock.now:
            return False
        done = decode_alone(replica, alone_until, now)
        if done:
            self.tracker.complete(done, self.trainer.step)
        return bool(done)

    def on_event(self, replica: SimulatedReplica, version: int) -> None:
        if version != replica.event:
            return
        alone_until = self.appointments.next(replica)
        if self.pass_ends(replica, alone_until, self.clock.now):
            self._enter(replica, alone_until)
        else:
            self.reach(replica, self.clock.now)
            self.settle(replica)

    def reach(self, replica: SimulatedReplica, time: float) -> None:
        """What happens at the replica's next event, but for what it admits then."""
        replica.advance(time, at_event=True)
        for request in replica.pop_finished():
            self.turn_done(replica, request, time)
        if replica.kv + replica.parked_kv >= replica.full:
            replica.make_room()

    def settle(self, replica: SimulatedReplica) -> None:
        """After any change: admit what fits, ask for more work if there is none, enter the next event."""
        if replica.index in self.down or self.paused or replica.state == "pull":
            return
        replica.fill()
        if self.rules.refresh == "interrupt":
            self.top_up(replica)
        elif self.several:
            refill_beside(self, replica)
        if replica.pending == 0 and replica.state not in ("pull", "move", "admission", "barrier", "weights"):
            self.drained(replica)
        self.schedule(replica)

    def turn_done(self, replica: SimulatedReplica, request: SimulatedRequest, time: float) -> None:
        request.turn += 1
        if request.play is None or not self.turns.turned(replica, request, time):
            self.trajectory_ended(replica, request, time)

    def trajectory_ended(self, replica: SimulatedReplica, request: SimulatedRequest, time: float) -> None:
        replica.pending -= 1
        request.home = None
        self.tracker.ends(time, request)
        if score := self.trainer.costs.score:
            self.clock.after(score, self.scored, request)
        else:
            self.scored(request)

    def scored(self, request: SimulatedRequest) -> None:
        if self.tracker.finish(request, self.trainer.step):
            self.clock.progress(finished=self.samples)
            self.clock.at(self.clock.now, self.trainer.poke)

    def drained(self, replica: SimulatedReplica) -> None:
        if self.rules.refresh == "barrier":
            replica.state = "barrier"
            self.barrier.add(replica.index)
            self.try_round()
        else:
            self.ask(replica)

    # ---- grants --------------------------------------------------------------------------------------------

    def give(self, replica: SimulatedReplica, request: SimulatedRequest, goes_on: bool = False) -> None:
        """`goes_on`: not from its prompt, but from where it is."""
        request.home = replica
        request.granted = self.clock.now
        request.away = False
        replica.pending += 1
        if request.play is None or goes_on:
            replica.waiting.append(request)
        else:
            self.turns.begin(replica, request)

    def give_anew(self, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        self.tracker.discarded_tokens += request.restart(request.group.prompt_tokens, replica.weight_step)
        self.give(replica, request)

    def quota(self, weight_step: int) -> int:
        """Groups that a replica with weights of this step may be granted."""
        return self.trainer.bound.quota(weight_step, self.tracker.counted, self.granted_steps)

    def ask(self, replica: SimulatedReplica) -> None:
        """An idle replica pulls newer weights first, then asks for a local batch."""
        if replica.index in self.down or replica.state == "pull":
            return
        replica.advance(self.clock.now)
        if replica.index in self.leaving:
            replica.state = "down"
            return
        if self.several:
            self.settle(replica)
            return
        if replica.weight_step < self.newest_at(replica.site):
            self.pull(replica, replica.costs.pull)
            return
        if self.rescue(replica):
            self.waiting_replicas.pop(replica.index, None)
            return
        groups_max = self.local_batch[replica.index]
        given = self.tracker.take_lost(groups_max * self.samples, replica.weight_step)
        for request in given:
            self.give_anew(replica, request)
        left = groups_max - len({request.group.group_id for request in given})
        for _ in range(min(left, self.quota(replica.weight_step))):
            new = list(self.tracker.new_group(replica.weight_step, groups_max).requests.values())
            for request in new:
                self.give(replica, request)
            given += new
        if given:
            self.turns.begun[replica.index] = len(given)
            self.waiting_replicas.pop(replica.index, None)
            replica.state = "generate"
            self.settle(replica)
        else:
            replica.state = "admission"
            self.waiting_replicas[replica.index] = None

    def top_up(self, replica: SimulatedReplica) -> None:
        """Continuous filling: whole groups while there is room, up to the replica's share of what admission
        allows to be in flight."""
        samples = self.samples
        batches = 1 + self.trainer.bound.batches(self.newest)
        pending_max = math.ceil(self.local_batch[replica.index] * batches) * samples
        places = min(pending_max, replica.max_concurrent)
        while not replica.waiting and (not replica.pending or replica.pending + samples <= places):
            if self.tracker.lost:
                self.give_anew(replica, self.tracker.lost.pop())
            elif self.quota(self.newest) > 0:
                size = self.local_batch[replica.index]
                for request in self.tracker.new_group(self.newest, size).requests.values():
                    self.give(replica, request)
            else:
                self.waiting_replicas[replica.index] = None
                if not replica.pending:
                    replica.state = "admission"
                return
            replica.state = "generate"
            replica.fill()

    def try_round(self) -> None:
        """Barrier: when all have drained, all take the newest weights, then one batch is spread over them
        trajectory by trajectory."""
        if len(self.barrier) < len(self.replicas) - len(self.down) or self.down:
            return
        if any(replica.weight_step < self.newest for replica in self.replicas):
            self.barrier.clear()
            for replica in self.replicas:
                replica.advance(self.clock.now)
                self.pull(replica, 0.0 if self.rules.placement == "colocated" else self.global_sync_seconds)
            return
        if self.quota(self.newest) < self.groups_per_step:
            for replica in self.replicas:
                replica.advance(self.clock.now)
                replica.state = "train" if self.rules.placement == "colocated" else "weights"
            return
        self.barrier.clear()
        size = max(self.local_batch)
        groups = [self.tracker.new_group(self.newest, size) for _ in range(self.groups_per_step)]
        requests = [request for group in groups for request in group.requests.values()]
        edges = [0, *accumulate(self.local_batch)]
        each = [round(edge / edges[-1] * len(requests)) for edge in edges]
        for replica, start, end in zip(self.replicas, each, each[1:], strict=False):
            replica.advance(self.clock.now)
            for request in requests[start:end]:
                self.give(replica, request)
            replica.state = "generate"
        for replica in self.replicas:
            self.settle(replica)

    # ---- weights -------------------------------------------------------------------------------------------

    def weights_available(self, step: int) -> None:
        """Step `step` can be had by all beside the trainer, and is on its way to the others."""
        self.newest = step
        self.slots[0].append(step)
        self.deliveries.publish(step)
        if self.rules.refresh == "interrupt":
            self.paused = False
            for replica in self.replicas:
                self.interrupt(replica)
        elif self.rules.refresh == "barrier":
            self.try_round()
        else:
            self.feed_hungry()

    def newest_at(self, site: int) -> int:
        return self.slots[site][-1]

    def arrived(self, site: int, step: int) -> None:
        self.slots[site].append(step)
        self.feed_hungry()

    def feed_hungry(self) -> None:
        for index in list(self.waiting_replicas):
            self.ask(self.replicas[index])

    def pull(self, replica: SimulatedReplica, seconds: float, step: int | None = None) -> None:
        """The newest weights, or those of `step`."""
        replica.state = "pull"
        replica.prompts.clear()
        replica.pulls += 1
        step = self.newest_at(replica.site) if step is None else step
        self.clock.after(seconds, self.pulled, replica, step, replica.pulls)

    def pulled(self, replica: SimulatedReplica, step: int, pull: int) -> None:
        replica.advance(self.clock.now)
        if replica.index in self.down or pull != replica.pulls:
            return
        replica.weight_step = replica.weight_id = step
        if self.rules.refresh == "barrier":
            replica.state = "barrier"
            self.barrier.add(replica.index)
            self.try_round()
        else:
            replica.state = "generate"
            self.waiting_replicas.pop(replica.index, None)
            if self.rules.refresh == "interrupt" or replica.pending:
                self.settle(replica)
            else:
                self.ask(replica)

    def interrupt(self, replica: SimulatedReplica) -> None:
        """New weights come into everything in progress."""
        if replica.index in self.down:
            return
        replica.advance(self.clock.now)
        self.unload(replica, keep_kv=self.rules.keep_kv)
        for request in replica.waiting:
            request.versions += request.remaining < request.turns[request.turn] or request.turn > 0
        self.schedule(replica)
        self.pull(replica, 0.0 if self.rules.placement == "colocated" else self.global_sync_seconds)

    def unload(self, replica: SimulatedReplica, keep_kv: bool) -> None:
        replica.waiting.extend(replica.take_all(keep_kv))
        replica.stall_until = 0.0

    def start_training(self) -> None:
        """Colocated: all GPUs are the trainer's until the next weights are there."""
        self.paused = self.rules.refresh == "interrupt"
        for replica in self.replicas:
            replica.advance(self.clock.now)
            self.unload(replica, keep_kv=False)
            replica.state = "train"
            self.schedule(replica)
