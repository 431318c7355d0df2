"""What the controller knows of the run now, as the Status that `laminar top` shows. Changes nothing."""

import os
import time

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.loop import Controller
from laminar_hpc.store.status import Queues, RankStatus, Status


def status(controller: Controller) -> Status:
    """The run at this moment, for status.json; called at every write of it."""
    c = controller
    return Status(
        time=time.time(),
        pid=os.getpid(),
        machine=c.members.machine,
        step=c.state.trainer_step,
        steps=c.config.steps,
        stopping=c.state.stopping,
        newest_weight_id=c.weights.newest.weight_id if c.weights.newest else None,
        rewards_scored=c.reports.reward_errors.scored,
        reward_errors=c.reports.reward_errors.count,
        ranks=[
            _rank(c, member)
            for member in sorted(c.members.by_place.values(), key=lambda m: (m.hello.role, m.hello.index))
        ],
        queues=Queues(
            generating=len(c.tracker.groups.live) - c.tracker.ready_groups,
            ready=c.tracker.ready_groups,
            unscored=c.tracker.groups.holders.unscored,
            evaluations=len(c.evaluations.queue) if c.evaluations else 0,
            replicas_waiting=len(c.replicas.waiting),
            trainer_waits=c.training.waits_for,
        ),
    )


def _rank(c: Controller, member: Member) -> RankStatus:
    hello, weight_id, report = member.hello, None, None
    if hello.role == "rollout":
        row = c.replicas.at(hello.index)
        weight_id, report = row.weight_id, row.report
    elif hello.role == "relay":
        newest = c.weights.newest_on(hello.machine)
        weight_id = newest.weight_id if newest else None
    else:
        weight_id = c.weights.newest_issued
    return RankStatus(
        hello.role,
        hello.index,
        hello.pid,
        hello.machine,
        time.time() - (time.monotonic() - member.last_seen),
        weight_id,
        None if weight_id is None else c.weights.steps.get(weight_id),
        report,
    )
