"""What moves trajectories between replicas: `policies.repack` on a timer and after updates,
`policies.failover` after a death."""

import math
import random
from collections import Counter
from functools import partial
from itertools import chain, groupby

from laminar_hpc.policies.failover import Idle, Orphan, Room, plan_reloads, redirect
from laminar_hpc.policies.remaining import RemainingLengths
from laminar_hpc.policies.repack import (
    EngineLimits,
    Load,
    MoveCosts,
    ReplicaView,
    RequestView,
    Transfer,
    plan,
)
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.rollouts import Rollouts
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.wide_area.hand_over import HandOver


class SimulatedRepacker:
    """Empties replicas where that pays. `limits`: of the smallest engine."""

    def __init__(self, rollouts: Rollouts, setup: SimulationSetup) -> None:
        self.rollouts = rollouts
        self.requests_max = min(kind.saturation for kind in setup.engines)
        auto, costs = setup.rules.repack == "auto", setup.engines[0].costs
        powers = range(self.requests_max.bit_length() + 1)
        points = sorted({min(1 << power, self.requests_max) for power in powers}) if auto else []
        self.limits = EngineLimits(
            setup.repack_kv_share * min(replica.capacity for replica in rollouts.replicas),
            self.requests_max,
            [(n, costs.step(n, 0.0)) for n in points],
            prefills=setup.rules.repack == "reprefill",
        )
        self.costs = MoveCosts(forced=not auto)
        self.lengths = RemainingLengths(setup.workload.max_response_tokens)
        self.prompt_tokens = setup.workload.prompt_tokens
        if setup.rules.empties:
            rollouts.tracker.lengths = []
        self.replicas_emptied = 0
        self.trajectories_moved = 0
        self.move_seconds = 0.0

    def tick(self) -> None:
        self.look()
        self.rollouts.clock.charge(len(self.rollouts.replicas) // 8)
        self.look_again()

    def look_again(self) -> None:
        clock = self.rollouts.clock
        time = clock.now + self.rollouts.trainer.costs.repack_period
        self.rollouts.appointments.add_look(time)
        clock.at(time, self.tick)

    def look(self) -> None:
        """Where admission would give an emptied replica nothing, nobody is looked at."""
        r, least = self.rollouts, min(self.rollouts.local_batch)
        emptied_max = [math.ceil(r.quota(slots[-1]) / least) for slots in r.slots]
        if not any(emptied_max):
            return
        ended = r.tracker.lengths or []
        # a replica may have gone on by itself for long
        self.lengths.extend([tokens for _, tokens in sorted(ended)])
        ended.clear()
        gone = r.down | r.leaving
        views: list[list[ReplicaView]] = [[] for _ in r.slots]  # of each site
        for replica in r.replicas:
            here = len(replica.running) + len(replica.away) + len(replica.waiting)
            works = 0 < here == replica.pending <= replica.max_concurrent and replica.state != "pull"
            if works and not replica.visitors and replica.index not in gone:
                replica.advance(r.clock.now)
                views[replica.site].append(self._view(replica))
        for site, most in zip(views, emptied_max, strict=True):
            if most > 0 and len(site) > 1:
                self.carry_out(plan(site, self.limits, self.costs, most))

    def _view(self, replica: SimulatedReplica) -> ReplicaView:
        return ReplicaView(
            replica.index,
            replica.weight_id,
            replica.kv + sum(request.context for request in replica.away.values()),
            replica.pending,
            partial(self._requests, replica),
            len(replica.waiting),
            partial(self._load, replica),
        )

    def _contexts(self, replica: SimulatedReplica) -> list[float]:
        """Tokens of each request: those that run, are with their environments, wait."""
        contexts = [request.offset + replica.steps for request in replica.running.values()]
        return contexts + [request.context for request in chain(replica.away.values(), replica.waiting)]

    def _remaining(self, contexts: list[float]) -> list[float]:
        prompt = self.prompt_tokens
        return self.lengths.expected_each([context - prompt for context in contexts])

    def _load(self, replica: SimulatedReplica) -> Load:
        contexts = self._contexts(replica)
        remaining = self._remaining(contexts)
        return Load(len(contexts), sum(contexts), sum(remaining), max(remaining))

    def _requests(self, replica: SimulatedReplica) -> list[RequestView]:
        requests = [*replica.running.values(), *replica.away.values(), *replica.waiting]
        contexts, queued = self._contexts(replica), len(replica.waiting)
        return [
            RequestView(request.trajectory_id, request.group.group_id, context, remaining, place >= 0)
            for place, (request, context, remaining) in enumerate(
                zip(requests, contexts, self._remaining(contexts), strict=True), queued - len(requests)
            )
        ]

    def carry_out(self, transfers: list[Transfer]) -> None:
        for source, parts in groupby(transfers, key=lambda transfer: transfer.source):
            self._move(self.rollouts.replicas[source], list(parts))

    def _move(self, source: SimulatedReplica, transfers: list[Transfer]) -> None:
        """Room is reserved at once; requests go on when they have arrived, and the source is free then."""
        ship, replicas = self.rollouts.rules.repack != "reprefill", self.rollouts.replicas
        to = {i: replicas[part.destination] for part in transfers for i in part.trajectories}
        away = {i: request for i, request in source.away.items() if i in to}
        parked = [request for i, request in source.parked.items() if i in to]
        for request in parked:
            source.unpark(request)
        moved = source.take(to.keys(), keep_kv=ship)
        for (group, _), count in Counter((r.group, to[r.trajectory_id].index) for r in moved).items():
            group.scattered |= count < group.unfinished
        kv = sum(request.context - request.uncached for request in [*moved, *parked])
        seconds = source.costs.move_latency + (kv * source.costs.move_token if ship else 0.0)
        for request in [*moved, *away.values()]:
            destination = to[request.trajectory_id]
            request.home = destination
            request.moves += 1
            source.pending -= 1
            destination.pending += 1
            if request.trajectory_id in away:
                del source.away[request.trajectory_id]
                destination.away[request.trajectory_id] = request
        for request in parked:  # its KV is there when the answer comes: waits are longer than moves
            if ship:
                to[request.trajectory_id].park(request)
            else:
                request.uncached = request.context
        self.trajectories_moved += len(to)
        self.move_seconds += seconds
        if not source.pending:
            self.replicas_emptied += 1
            source.state = "move"
        self.rollouts.schedule(source)
        for part in transfers:
            destination = replicas[part.destination]
            destination.visitors += 1
            mine = [request for request in moved if to[request.trajectory_id] is destination]
            self.rollouts.clock.after(seconds, self.arrived, source, destination, mine)
        if kv:
            self.costs.add(seconds)

    def arrived(
        self, source: SimulatedReplica, destination: SimulatedReplica, moved: list[SimulatedRequest]
    ) -> None:
        now = self.rollouts.clock.now
        source.advance(now)
        if source.state == "move":
            source.state = "generate"
            self.rollouts.settle(source)
        destination.advance(now)
        destination.visitors -= 1
        # others were lost with the destination meanwhile
        mine = [request for request in moved if request.home is destination]
        destination.waiting.extendleft(reversed(mine))
        self.rollouts.settle(destination)


class Failures:
    """Deaths of replicas and of the trainer, at exponential intervals that the seed gives."""

    def __init__(self, rollouts: Rollouts, setup: SimulationSetup) -> None:
        self.rollouts = rollouts
        self.random = random.Random(f"failures:{setup.seed}")
        self.trainer_mtbf = setup.trainer_mtbf
        self.replica_deaths = 0
        self.trainer_deaths = 0
        self.redirected = 0
        self.restarted = 0
        self.loaded = 0
        # nobody generates with their weights: they wait for a replica to ask
        self.stranded: dict[int, SimulatedRequest] = {}
        rollouts.rescue = self.rescue
        self.hand_over = HandOver(rollouts)
        for replica in rollouts.replicas:
            self._next(replica)
        if self.trainer_mtbf:
            self._next_trainer(self.trainer_mtbf)

    def _next_trainer(self, mtbf: float) -> None:
        self.rollouts.clock.after(self.random.expovariate(1 / mtbf), self.trainer_dies, mtbf)

    def _next(self, replica: SimulatedReplica) -> None:
        if replica.mtbf:
            self.rollouts.clock.after(self.random.expovariate(1 / replica.mtbf), self.replica_dies, replica)

    def trainer_dies(self, mtbf: float) -> None:
        self.trainer_deaths += 1
        self._job_restarts(rollouts_too=not self.rollouts.rules.isolated)
        self._next_trainer(mtbf)

    def _job_restarts(self, rollouts_too: bool = True) -> None:
        """The trainer's job starts again; with the rollouts in it, all in progress begins again."""
        r = self.rollouts
        restart = r.trainer.costs.job_restart
        r.trainer.fail(restart)
        if not rollouts_too:
            return
        for replica in r.replicas:
            if replica.index not in r.down:
                self._down(replica, restart)
        for group in r.tracker.live.values():
            for request in group.requests.values():
                if request.home is not None:
                    r.tracker.discarded_tokens += request.restart(group.prompt_tokens, request.weight_step)
                    if request.away:
                        request.away = False
                        request.home.away.pop(request.trajectory_id, None)
                        request.home.waiting.append(request)

    def replica_dies(self, replica: SimulatedReplica) -> None:
        self._next(replica)
        if self.rollouts.gone(replica):
            return
        if replica.grace and self.rollouts.rules.isolated:
            self.hand_over.begin(replica)
            self.rollouts.clock.after(replica.grace, self._taken_away, replica)
        else:
            self._taken_away(replica)

    def _taken_away(self, replica: SimulatedReplica) -> None:
        self.rollouts.leaving.discard(replica.index)
        if replica.index in self.rollouts.down:
            return  # the whole job went down meanwhile
        self.replica_deaths += 1
        if self.rollouts.rules.isolated:
            self._down(replica, replica.costs.restart)
            self._rescue(replica)
        else:
            self._job_restarts()

    def _down(self, replica: SimulatedReplica, seconds: float) -> None:
        r = self.rollouts
        replica.advance(r.clock.now)
        r.unload(replica, keep_kv=False)
        r.down.add(replica.index)
        r.waiting_replicas.pop(replica.index, None)
        r.schedule(replica)
        replica.state = "down"
        r.clock.after(seconds, self._up, replica)

    def _rescue(self, dead: SimulatedReplica) -> None:
        """Moves the dead replica's trajectories to replicas on its weights with room, else to prompts."""
        r = self.rollouts
        orphans = {
            i: q for group in r.tracker.live.values() for i, q in group.requests.items() if q.home is dead
        }
        rooms = r.rooms()
        drained = r.rules.refresh in ("drained", "versions")  # a trajectory keeps its weights
        views = [self._orphan(q, q.weight_step if drained else dead.weight_id) for q in orphans.values()]
        placed = redirect(views, rooms, dead.admission.reserve_min)
        dead.waiting.clear()
        dead.parked.clear()
        dead.away.clear()
        dead.parked_kv = 0.0
        dead.pending = 0
        for i, request in orphans.items():
            if i in placed:
                replica = r.replicas[placed[i]]
                request.home = replica
                request.uncached = request.context
                replica.pending += 1
                self.redirected += 1
                if request.away:  # the environment's answer finds its way by itself
                    replica.away[i] = request
                else:
                    replica.waiting.append(request)
                    r.settle(replica)
            else:
                request.home = None
                if drained and not request.away:
                    self.stranded[i] = request
                else:
                    self._begin_anew(request)
        if r.tracker.lost or self.stranded:
            r.feed_hungry()

    @staticmethod
    def _orphan(q: SimulatedRequest, weight_id: int) -> Orphan:
        return Orphan(
            q.trajectory_id,
            weight_id,
            int(q.context),
            int(sum(q.turns[: q.turn]) + q.turns[q.turn] - q.remaining),
        )

    def _begin_anew(self, request: SimulatedRequest) -> None:
        self.restarted += 1
        self.rollouts.tracker.lost.append(request)

    def rescue(self, replica: SimulatedReplica) -> bool:
        """Gives a replica that asks for work the stranded trajectories, if it can take any: it loads their
        weights first if it serves others. Gives whether it took some."""
        if not self.stranded:
            return False
        r, now = self.rollouts, self.rollouts.clock.now
        orphans = [self._orphan(q, q.weight_step) for q in self.stranded.values()]
        if r.several:
            return self._rescue_beside(replica, orphans)
        loadable = frozenset(r.slots[replica.site])
        mine = Idle(
            replica.index,
            replica.weight_id,
            loadable,
            replica.capacity,
            replica.generated / now * replica.costs.pull,
        )
        reloads, again = plan_reloads(orphans, [mine], replica.admission.reserve_min)
        for i in again:
            self._begin_anew(self.stranded.pop(i))
        for each in reloads:
            for i in each.trajectory_ids:
                request = self.stranded.pop(i)
                request.uncached = request.context
                r.give(replica, request, goes_on=True)
            if each.weight_id != replica.weight_id:
                self.loaded += len(each.trajectory_ids)
                r.pull(replica, replica.costs.pull, each.weight_id)
            else:
                self.redirected += len(each.trajectory_ids)
                replica.state = "generate"
                r.settle(replica)
        return bool(reloads)

    def _rescue_beside(self, replica: SimulatedReplica, orphans: list[Orphan]) -> bool:
        """As `rescue`, of a replica that holds several weights. What nobody holds any more begins anew."""
        r = self.rollouts
        free = replica.capacity - replica.kv - replica.parked_kv - sum(q.context for q in replica.waiting)
        held = set(r.held(replica))
        rooms = [Room(replica.index, weight_id, free) for weight_id in held]
        placed = redirect(orphans, rooms, replica.admission.reserve_min)
        for i in placed:
            request = self.stranded.pop(i)
            request.uncached = request.context
            r.give(replica, request, goes_on=True)
            self.redirected += 1
        for orphan in orphans:
            if orphan.weight_id < min(held):
                self._begin_anew(self.stranded.pop(orphan.trajectory_id))
        replica.fill()
        return bool(placed)

    def _up(self, replica: SimulatedReplica) -> None:
        r = self.rollouts
        replica.advance(r.clock.now)
        r.down.discard(replica.index)
        newest = r.newest_at(replica.site)
        replica.weight_step = replica.weight_id = newest if replica.pending == 0 else replica.weight_step
        replica.state = "generate"
        if r.rules.refresh == "barrier" and replica.pending == 0:
            r.drained(replica)
        elif replica.pending == 0 and r.rules.refresh == "drained":
            r.ask(replica)
        else:
            r.settle(replica)
