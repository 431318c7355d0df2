"""What the controller knows of the run now, as the Status that `laminar top` shows. Reads the controller,
changes nothing."""

import os
import time

from laminar_hpc.controller.loop import Controller
from laminar_hpc.controller.members import Member
from laminar_hpc.observability.status import Queues, Rank, Status


def status(controller: Controller) -> Status:
    c = controller
    samples = [
        sample
        for group in c.tracker.groups.values()
        if not group.finished
        for sample in group.samples.values()
    ]
    finished = sum(group.finished for group in c.tracker.groups.values())
    return Status(
        time=time.time(),
        pid=os.getpid(),
        machine=c.members.machine,
        step=c.trainer_step,
        steps=c.config.steps,
        stopping=c.stopping,
        newest_weight_id=c.weights.newest[0],
        rewards_scored=c.reward_errors.scored,
        reward_errors=c.reward_errors.count,
        ranks=[
            _rank(c, member)
            for member in sorted(c.members.by_place.values(), key=lambda m: (m.hello.role, m.hello.index))
        ],
        queues=Queues(
            generating=len(c.tracker.groups) - finished,
            ready=finished,
            unscored=sum(sample.generated is not None for sample in samples),
            evaluations=len(c.evaluations.queue) if c.evaluations else 0,
            replicas_waiting=len(c.waiting),
            trainer_waits=c.take_reason if c.take is not None else "",
        ),
    )


def _rank(c: Controller, member: Member) -> Rank:
    hello = member.hello
    rank = Rank(
        hello.role, hello.index, hello.pid, hello.machine, time.time() - (time.monotonic() - member.heard)
    )
    if hello.role == "rollout":
        rank.weight_id = c.open_weights.get(hello.index, -1)
        rank.load = c.loads.get(hello.index)
    elif hello.role == "relay":
        rank.weight_id = c.weights.of_machine.get(hello.machine, (-1, -1))[0]
    elif c.weights.steps:
        rank.weight_id = max(c.weights.steps)
    rank.weight_step = c.weights.steps.get(rank.weight_id, -1)
    return rank
