"""Three replicas on weight id 0 of a scripted controller, each with a grant of its own, and moves between
them, message by message."""

import time
from pathlib import Path

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.messages.data import Message, Partial, ReplicaLoad
from laminar_hpc.messages.membership import Ping
from laminar_hpc.messages.moves import Import, Imported, MoveCommit, MoveOrder, MoveReady, Reserve, Reserved
from laminar_hpc.messages.rollouts import Grant


class Three:
    """`script`, and `grant`: what replica 0 was granted."""

    def __init__(self, folder: Path) -> None:
        config = small_config(folder, replicas=3, steps=4)
        config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 6, 2
        config.rollout.increment_tokens, config.pipeline.repack = 10, "reprefill"
        self.script = Script(config)
        self.script.publish(0, 0)
        grants = []
        for index in range(3):
            self.script.rollout(index)
            self.script.asks(index, 0)
            grants.append(self.script.granted(index))
            load = ReplicaLoad("draining", 0, 4, 0, kv_capacity=10_000, kv_tokens=100)
            self.script.hear("rollout", index, Ping(load))
        assert all(grants) and isinstance(grants[0], Grant)
        self.grant = grants[0]

    def sent(self, replica: int, kind: type[Message]) -> list:
        return [m for m in self.script.hub.left.get(f"rollout:{replica}:", []) if isinstance(m, kind)]

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
        script.hear("rollout", source, MoveReady(order.move_id, partial))
        script.hear("rollout", destination, Imported(order.move_id, 0))
        assert self.sent(destination, MoveCommit)[-1].attempt == attempt + 1
        given: Partial = self.sent(destination, Import)[-1].partial
        return given
