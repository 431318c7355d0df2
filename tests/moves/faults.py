"""Faults that hit moves under way, at a phase and in a way drawn by a seed: the engine refuses, hangs or dies, a message is lost."""

import asyncio
import random
from collections import Counter

from laminar_hpc import messages as m
from laminar_hpc.kv.errors import KvRefused
from laminar_hpc.rollout.worker import RolloutWorker

CALLS = ("kv_reserve", "kv_send", "kv_detach", "kv_import", "kv_commit", "kv_abort")
MESSAGES = ("Reserve", "Reserved", "MoveOrder", "MoveReady", "Import", "Imported", "MoveCommit", "MoveAbort", "MoveFailed")
ENGINE_FAULTS = [(call, kind) for call in CALLS for kind in ("refuse", "hang", "die before", "die after") if (call, kind) not in
                 {("kv_commit", "refuse"), ("kv_abort", "refuse")}]  # fmt: skip
MOST = 3
LATE = ("kv_import", "kv_commit")  # few moves come so far between the others' faults
FAULTS = [*ENGINE_FAULTS, *((name, "lost") for name in MESSAGES)]


class Saboteur:
    """Draws faults until `wanted` have struck, at most MOST of a kind, so that early phases do not take them all. `hang`: seconds."""

    def __init__(self, seed: int, wanted: int, share: float, hang: float) -> None:
        self.random, self.wanted, self.share, self.hang = random.Random(seed), wanted, share, hang
        self.struck: Counter = Counter()

    def strikes(self, where: str, kinds: tuple[str, ...]) -> str:
        """The kind of the fault that strikes here, or ""."""
        left = [kind for kind in kinds if (where, kind) in FAULTS and self.struck[where, kind] < MOST]
        share = 1.0 if where in LATE else self.share
        if not left or self.struck.total() >= self.wanted or self.random.random() > share:
            return ""
        kind = min(left, key=lambda kind: (self.struck[where, kind], self.random.random()))
        self.struck[where, kind] += 1
        return kind


def sabotaged(saboteur: Saboteur, engine: type) -> type[RolloutWorker]:
    """A worker whose engine, an `engine` that can `die`, and line to the controller suffer the saboteur's faults."""

    class Engine(engine):
        async def _hurt(self, call: str, work):
            kind = saboteur.strikes(call, ("refuse", "hang", "die before", "die after"))
            if kind in ("refuse", "die before"):
                work.close()
                if kind == "refuse":
                    raise KvRefused(f"{call} refused by the test")
                self.die()
                await self.process.dead.wait()
                raise self.process.death()
            if kind == "hang":
                await asyncio.sleep(saboteur.hang)
            result = await work
            if kind == "die after":
                self.die()
            return result

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            return (lambda *words: self._hurt(name, found(*words))) if name in CALLS else found

    class Worker(RolloutWorker):
        def __init__(self, context, pool=None):
            super().__init__(context, pool)
            send = context.channel.send
            context.channel.send = lambda word: None if saboteur.strikes(type(word).__name__, ("lost",)) else send(word)

        def _new_engine(self):
            return Engine(self.config, self.context.index, self.context.run_dir)

        def _arrived(self, item):
            if not (isinstance(item, m.Message) and saboteur.strikes(type(item).__name__, ("lost",))):
                super()._arrived(item)

    return Worker
