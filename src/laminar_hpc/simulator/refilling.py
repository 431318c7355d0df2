"""refresh=versions: new work for a replica beside what it generates, on the newest weights of its place, as
`policies.refill` says. Called by rollouts.py after each change of a replica."""

from typing import TYPE_CHECKING

from laminar_hpc.policies import refill
from laminar_hpc.simulator.replica import SimulatedReplica

if TYPE_CHECKING:
    from laminar_hpc.simulator.rollouts import Rollouts


def _may_begin(replica: SimulatedReplica, samples: int) -> bool:
    """A group can begin at once beside what the replica generates, or it generates nothing."""
    at_work, waiting = replica.pending - len(replica.away), len(replica.waiting)
    room = refill.room(at_work, waiting, replica.kv, replica.capacity, replica.max_concurrent)
    return room >= samples or not replica.pending


def refill_beside(r: "Rollouts", replica: SimulatedReplica) -> None:
    """Whole groups, up to a local batch, while they can begin at once. One that could take more asks again,
    behind the others."""
    if r.gone(replica):
        return
    replica.weight_step = replica.weight_id = step = r.newest_at(replica.site)
    begun = r.rescue(replica)
    for _ in range(r.local_batch[replica.index]):
        if not _may_begin(replica, r.samples):
            break
        if lost := r.tracker.take_lost(r.samples, step):
            for request in lost:
                r.give_anew(replica, request)
        elif r.quota(step) > 0:
            for request in r.tracker.new_group(step, r.local_batch[replica.index]).requests.values():
                r.give(replica, request)
        else:
            break
        begun = True
        replica.fill()
    if begun:
        r.waiting_replicas.pop(replica.index, None)
        r.turns.begun[replica.index] = replica.pending
        replica.state = "generate"
    if _may_begin(replica, r.samples):
        r.waiting_replicas[replica.index] = None
        if begun and (r.tracker.lost or r.quota(step) > 0):
            r.clock.at(r.clock.now, r.ask, replica)
    if not replica.pending:
        replica.state = "admission"
