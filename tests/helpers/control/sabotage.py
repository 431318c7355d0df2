"""Faults that hit moves under way, at a phase and in a way drawn by a seed: the engine refuses, hangs or
dies, a message is lost. And a killer of engines that are alone with older weights."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from laminar_hpc.controller.loop import Controller
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.line.messages.data import Message, Trajectory
from laminar_hpc.rollout.worker import RolloutWorker

CALLS = ("kv_reserve", "kv_send", "kv_detach", "kv_import", "kv_commit", "kv_abort")
MESSAGES = (
    "Reserve",
    "Reserved",
    "MoveOrder",
    "MoveReady",
    "Import",
    "Imported",
    "MoveCommit",
    "MoveAbort",
    "MoveFailed",
)
ENGINE_FAULTS = [
    (call, kind)
    for call in CALLS
    for kind in ("refuse", "hang", "die before", "die after")
    if (call, kind) not in {("kv_commit", "refuse"), ("kv_abort", "refuse")}
]
MOST = 3
LATE = ("kv_import", "kv_commit")  # few moves come so far between the others' faults
FAULTS = [*ENGINE_FAULTS, *((name, "lost") for name in MESSAGES)]


class Saboteur:
    """Draws faults until `wanted` have struck, at most MOST of a kind, so that early phases do not take them
    all. `hang`: seconds."""

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
    """A worker whose engine, an `engine` that can `die`, and line to the controller suffer the saboteur's
    faults."""

    class Engine(engine):
        async def _hurt(self, call: str, begin: Callable[[], Awaitable]):
            """`begin` makes the coroutine, which must not be made where a hang is cut off."""
            kind = saboteur.strikes(call, ("refuse", "hang", "die before", "die after"))
            if kind == "refuse":
                raise KvRefused(f"{call} refused by the test")
            if kind == "die before":
                self.die()
                raise await self.died()
            if kind == "hang":
                await asyncio.sleep(saboteur.hang)
            result = await begin()
            if kind == "die after":
                self.die()
            return result

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            return (lambda *words: self._hurt(name, partial(found, *words))) if name in CALLS else found

    class Worker(RolloutWorker):
        def __init__(self, context, pool):
            super().__init__(context, lambda: Engine(context.config, context.index, context.run_dir), pool)
            send = context.channel.send
            context.channel.send = lambda word: (
                None if saboteur.strikes(type(word).__name__, ("lost",)) else send(word)
            )

        def _arrived(self, item):
            if not (isinstance(item, Message) and saboteur.strikes(type(item).__name__, ("lost",))):
                super()._arrived(item)

    return Worker


class Killer:
    """After every turn of the controller: kills the engine of a replica once `tokens` of its responses are
    known; `alone`: only of one that no other has the weights of, which are those before the newest. `most`
    times, `every` seconds at most.
    `kill(replica, known)` does it, and says whether any of the `known` was still generated there."""

    def __init__(
        self,
        kill: Callable[[int, set[int]], bool],
        most: int,
        tokens: int,
        every: float,
        alone: bool = True,
    ) -> None:
        self.kill, self.most, self.tokens, self.every = kill, most, tokens, every
        self.alone = alone
        # weight id, response tokens by trajectory and attempt, as far as they were known
        self.killed: list[tuple[int, dict[tuple[int, int], int]]] = []
        self._next = 0.0

    def __call__(self, controller: Controller) -> None:
        if len(self.killed) >= self.most or time.monotonic() < self._next or controller.state.trainer_done:
            return
        holders = controller.tracker.groups.holders
        owned = {replica: holders.generating(replica) for replica in holders.generating_counts()}
        ids = {replica: controller.replicas.at(replica).weight_id for replica in owned}
        for replica, mine in owned.items():
            weight_id, newest = ids[replica], controller.weights.newest
            samples = [(i, sample.attempt) for _, i, sample in mine]
            known = {sample: part.count for sample in samples if (part := controller.pool.get(*sample))}
            alone = newest is not None and weight_id == newest.weight_id - 1
            alone &= all(ids[other] != weight_id for other in owned if other != replica)
            if (
                (alone or not self.alone)
                and sum(known.values()) >= self.tokens
                and self.kill(replica, {i for i, _ in known})
            ):
                self.killed.append((weight_id, known))
                self._next = time.monotonic() + self.every
                return

    def lost(self, moves: list[dict], found: Mapping[int, Trajectory]) -> int:
        """The known tokens that none of the `moves` took elsewhere. What kept its attempt had just ended."""
        kept = {(move["trajectory_id"], move["weight_id"]) for move in moves}
        return sum(
            tokens
            for weight_id, known in self.killed
            for (i, attempt), tokens in known.items()
            if (i, weight_id) not in kept and found[i].attempt > attempt
        )
