"""Machines that are taken back under a `Stand`, and a count of what the engines did."""

from collections.abc import Sequence

from helpers.emulated.stand import PROMPT_TOKENS, Stand
from laminar_hpc.controller.loop import Controller
from laminar_hpc.engine.interface import Generation
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import Terminated
from laminar_hpc.rollout.worker import RolloutWorker
from laminar_hpc.simulator.emulated.engine import EmulatedEngine


class Ledger:
    """What all engines of a run, each an `engine`, have drawn, and what they have prefilled of that."""

    def __init__(self, engine: type = EmulatedEngine) -> None:
        self.engine = engine
        self.drawn = self.prefilled = 0

    def new_worker(self, context: RoleContext, pool: RewardPool) -> RolloutWorker:
        ledger = self

        class Counting(self.engine):
            async def generate(self, prompt_tokens: Sequence[int], *given, **more) -> Generation:
                generation = await super().generate(prompt_tokens, *given, **more)
                ledger.drawn += len(generation.tokens)
                if len(prompt_tokens) > PROMPT_TOKENS:
                    ledger.prefilled += len(prompt_tokens) - generation.cached_tokens
                return generation

        return RolloutWorker(context, lambda: Counting(context.config, context.index, context.run_dir), pool)


class TakenBack:
    """After a turn of the controller: tells every replica to end, as SIGTERM does, once each generates so
    many responses; others come in their places."""

    def __init__(self, stand: Stand, under_way: int) -> None:
        self.stand = stand
        self.under_way = under_way
        self.told = False

    def __call__(self, controller: Controller) -> None:
        owned = controller.tracker.groups.holders.generating_counts()
        busy = [i for i, count in owned.items() if count >= self.under_way]
        replicas = controller.config.rollout.replicas
        if self.told or min(len(controller.failover.rooms()), len(busy)) < replicas:
            return
        self.told = True
        for index in busy:
            worker = self.stand.replicas[index].worker
            assert worker is not None
            worker.context.channel.interrupt(Terminated())
