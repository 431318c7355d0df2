"""Three replicas on weight id 0 of a scripted controller, each with a grant of its own, and moves between
them, message by message."""

import time
from collections.abc import Sequence
from pathlib import Path

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.line.messages.data import Partial, ReplicaLoad
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.line.messages.moves import (
    Import,
    Imported,
    MoveCommit,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)


class Three:
    """`script`, and `grant`: what replica 0 was granted."""

    def __init__(self, folder: Path) -> None:
        config = small_config(folder, replicas=3, steps=4, prompts=6, samples=2, repack="reprefill")
        config.rollout.increment_tokens = 10
        self.script = Script(config)
        self.sent = self.script.sent
        self.grant, *_ = self.script.working(3)
        for index in range(3):
            load = ReplicaLoad("draining", 0, 4, 0, kv_capacity=10_000, kv_tokens=100)
            self.script.hear("rollout", index, Ping(load))

    def take(self, trajectory_id: int, replicas: Sequence[int]) -> tuple[int, Reserve, Partial]:
        """Lets the one of these replicas that is asked reserve room for what a lost one had: that replica,
        what it was asked, and what it is to go on from."""
        ((replica, reserve),) = [
            (i, r) for i in replicas for r in self.sent(i, Reserve) if r.trajectory_id == trajectory_id
        ]
        self.script.hear("rollout", replica, Reserved(reserve.move_id, ""))
        (given,) = self.sent(replica, Import)
        return replica, reserve, given.partial

    def moves(
        self, trajectory_id: int, attempt: int, source: int, destination: int, partial: Partial
    ) -> Partial:
        """Without a fault; returns what the destination was sent of `partial`."""
        script = self.script
        script.controller.migration.begin(
            trajectory_id, attempt, source, destination, 0, 100, time.monotonic()
        )
        script.controller.turn()
        reserve = self.sent(destination, Reserve)[-1]
        script.hear("rollout", destination, Reserved(reserve.move_id, ""))
        order = self.sent(source, MoveOrder)[-1]
        siblings = b"tokens"
        script.hear("rollout", source, MoveReady(order.move_id, partial, siblings))
        script.hear("rollout", destination, Imported(order.move_id, 0))
        assert self.sent(destination, MoveCommit)[-1].attempt == attempt + 1
        given = self.sent(destination, Import)[-1]
        assert given.siblings == siblings, "what it says of the group comes along"
        return given.partial
