"""Replicas that get a notice before they are taken away: within the grace period their trajectories move,
with their KV cache, to others of the same place that serve the same weights. What finds no room, or does not
get through in time, goes on elsewhere from its tokens (fleet_moves.py)."""

from laminar_hpc.policies.failover import Orphan, redirect
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.rollouts import Rollouts


class HandOver:
    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.notices = 0
        self.handed_over = 0

    def begin(self, leaving: SimulatedReplica) -> None:
        """Grants the replica nothing more and moves its trajectories one by one, the longest first."""
        r, now = self.rollouts, self.rollouts.clock.now
        self.notices += 1
        r.leaving.add(leaving.index)
        r.waiting_replicas.pop(leaving.index, None)
        leaving.advance(now)
        mine = {q.trajectory_id: q for q in leaving.running.values()}
        for q in mine.values():
            q.context = q.offset + leaving.steps
        orphans = [Orphan(i, q.weight_step, int(q.context), 0) for i, q in mine.items()]
        rooms = r.rooms(lambda other: other.site == leaving.site)
        seconds = 0.0
        for i, index in redirect(orphans, rooms, leaving.admission.reserve_min).items():
            request, destination = mine[i], r.replicas[index]
            seconds += leaving.costs.move_latency + request.context * leaving.costs.move_token
            if seconds > leaving.grace:
                break
            leaving.stop(request)
            leaving.pending -= 1
            request.home = destination
            request.moves += 1
            destination.pending += 1
            self.handed_over += 1
            was = (request.moves, request.granted)
            r.clock.after(seconds, self._arrived, request, destination, was)
        r.settle(leaving)

    def _arrived(
        self, request: SimulatedRequest, destination: SimulatedReplica, was: tuple[int, float]
    ) -> None:
        if request.home is not destination or (request.moves, request.granted) != was:
            return  # lost with the destination meanwhile
        destination.advance(self.rollouts.clock.now)
        destination.waiting.appendleft(request)
        self.rollouts.settle(destination)
