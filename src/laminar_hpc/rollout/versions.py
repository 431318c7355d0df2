"""refresh=versions: a replica that holds several adapters at once. New work begins on the newest that it has,
while older trajectories go on on theirs: it never drains, and each trajectory still has one policy.

    newer adapter in the slots -> loaded beside what runs, verified, opened
    room for a group           -> RequestWork on the newest -> Grant -> into the batch that runs
    no trajectory needs an id  -> unloaded, unless it is among the newest policies.refill.held(bound)

`HeldVersions` says what is allowed, `Versions` does it. Owned by worker.py.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from laminar_hpc.line.messages.rollouts import Grant, RequestWork
from laminar_hpc.policies import refill
from laminar_hpc.rollout.adapter_loader import AdapterLoader
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.grants import Grants
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.served_weights import ServedWeights
from laminar_hpc.rollout.shutdown import GracefulShutdown
from laminar_hpc.rollout.state import ReplicaPhase, ReplicaState
from laminar_hpc.rollout.weight_loader import WeightLoader

_LOOK_SECONDS = 0.1  # between two looks for room; each asks the engine how full it is


class HeldVersions(ReplicaState):
    """A replica's state with several open ids. Invariants: a request is admitted only on an open id; an id is
    closed only while no request is on it, and never the newest; one adapter is loaded at a time.

    >>> state = HeldVersions(held_max=2)
    >>> for weight_id in (3, 4):
    ...     state.begin_pull(weight_id); state.verified(weight_id); state.open(weight_id - 1)
    ...     state.grant(weight_id, requests=1)
    >>> state.held, state.weight_id, state.phase
    ([3, 4], 4, <ReplicaPhase.DRAINING: 'draining'>)
    >>> state.begin_pull(5); state.verified(5); state.open(4)
    >>> state.unneeded(), state.finished(3), state.unneeded()
    ([], None, [3])
    """

    def __init__(self, held_max: int) -> None:
        """`held_max`: so many stay open without a request; there is a place for one more."""
        super().__init__()
        self._held_max = held_max
        self._requests = Counter[int]()  # in flight, by id
        self._open: set[int] = set()
        self._loading: int | None = None

    @property
    def held(self) -> list[int]:
        return sorted(self._open)

    def serves(self, weight_id: int) -> bool:
        return weight_id in self._open

    def _rest(self) -> ReplicaPhase:
        """What it does while nothing is loaded."""
        if not self._open:
            return ReplicaPhase.UNVERIFIED
        return ReplicaPhase.DRAINING if self.in_flight else ReplicaPhase.OPEN

    # ---- weights -------------------------------------------------------------------------------------------

    def begin_pull(self, weight_id: int, interrupted: bool = False, back: bool = False) -> None:
        free = self._loading is None and self.has_place
        self._require(free, f"loading weight id {weight_id} beside {self.held}")
        self._require(weight_id >= self.next_weight_id or back, f"going back to weight id {weight_id}")
        self._loading = weight_id
        if not self._open:
            self.phase = ReplicaPhase.PULLING

    def failed(self) -> None:
        self._require(self._loading is not None, "a pull that failed")
        self._loading = None
        self.phase = self._rest()

    def abandoned(self) -> None:
        super().abandoned()
        self._requests.clear()
        self._open.clear()
        self._loading = None

    def verified(self, weight_id: int) -> None:
        loading = self._loading
        self._require(
            loading is not None and weight_id >= loading, f"a verification of weight id {weight_id}"
        )
        self._loading = weight_id

    def open(self, weight_step: int) -> None:
        self._require(self._loading is not None, "opening")
        assert self._loading is not None
        self._open.add(self._loading)
        if self._loading >= self.next_weight_id:
            self.weight_id = self._loading
            self.weight_step = weight_step
        self._loading = None
        self.phase = self._rest()

    @property
    def has_place(self) -> bool:
        """Another adapter fits beside those that are open."""
        return len(self._open) <= self._held_max

    def unneeded(self) -> list[int]:
        """Open ids without a request that are not among the newest `held_max`."""
        return [i for i in self.held[: -self._held_max] if not self._requests[i]]

    def close(self, weight_id: int) -> None:
        """This id is about to be unloaded."""
        allowed = weight_id in self._open and weight_id != self.weight_id and not self._requests[weight_id]
        self._require(allowed, f"closing weight id {weight_id}")
        self._open.discard(weight_id)

    # ---- work ----------------------------------------------------------------------------------------------

    def grant(self, weight_id: int, requests: int) -> None:
        self._require(weight_id in self._open, f"work on weight id {weight_id}")
        self._require(requests > 0, "an empty batch")
        self._add(weight_id, requests)

    def reserve(self, weight_id: int) -> None:
        self._require(
            weight_id in self._open and self.in_flight > 0, f"a move of weight id {weight_id} to this replica"
        )
        self._add(weight_id, 1)

    def _add(self, weight_id: int, requests: int) -> None:
        self._requests[weight_id] += requests
        self.in_flight += requests
        self.phase = self._rest()

    def finished(self, weight_id: int | None = None) -> None:
        self._require(weight_id is not None and self._requests[weight_id] > 0, "the end of a request")
        assert weight_id is not None
        self._requests[weight_id] -= 1
        self.in_flight -= 1
        self.phase = self._rest()


class Versions:
    """`begin(grant)` gives the grant's trajectories once it is admitted; none where it was refused."""

    def __init__(
        self,
        batch: LocalBatch,
        wake: asyncio.Event,
        weights: ServedWeights,
        loader: WeightLoader,
        grants: Grants,
        shutdown: GracefulShutdown,
        begin: Callable[[Grant], Coroutine[Any, Any, list[TrajectoryInFlight]]],
    ) -> None:
        assert isinstance(batch.state, HeldVersions) and isinstance(loader, AdapterLoader)
        config = batch.config
        self._state = batch.state
        self._loader = loader
        self._batch = batch
        self._wake = wake
        self._weights = weights
        self._grants = grants
        self._shutdown = shutdown
        self._begin = begin
        self._samples = config.algorithm.first_samples or config.algorithm.samples_per_prompt
        self._requests_max = config.rollout.max_concurrent
        self._loads = asyncio.Lock()
        self._asked: tuple[int | None, int | None] | None = None  # weight id and newest batch of the last one
        self._room_asked = 0

    async def run(self, begun: list[TrajectoryInFlight]) -> None:
        """Does what LocalBatch.run does, with all that is granted meanwhile; also raises what ends a load."""
        batch, feed = asyncio.create_task(self._batch.run(begun)), asyncio.create_task(self._feed())
        try:
            await asyncio.wait((batch, feed), return_when=asyncio.FIRST_COMPLETED)
            if feed.done() and (error := feed.exception()):
                self._batch.fail(error)
            await batch
            async with self._loads:  # a load that has begun is completed
                feed.cancel()
            if feed.done() and not feed.cancelled():
                feed.result()  # it failed as the last trajectory ended
        finally:
            for task in (batch, feed):
                task.cancel()
            await asyncio.gather(batch, feed, return_exceptions=True)

    async def _feed(self) -> None:
        """Looks for a newer adapter, for grants and for room, until it is cancelled."""
        while True:
            self._wake.clear()
            if not self._shutdown.begun:
                async with self._loads:
                    await self.retire()
                    if self._weights.newer() and self._state.has_place:
                        await self._weights.pull()
                while self._grants and self._batch.under_way:
                    self._batch.add(self._start(self._grants.take()))
                await self._ask_for_more()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):  # wait_for of 3.11 may swallow a cancellation
                    await self._wake.wait()

    async def retire(self) -> None:
        """Unloads what nothing needs, which makes a place for another."""
        if unneeded := self._state.unneeded():
            for weight_id in unneeded:
                self._state.close(weight_id)
            await self._loader.retire(self._state.held)

    async def _start(self, grant: Grant) -> None:
        """A task of the batch, which is not over before it has the grant's trajectories."""
        async with self._loads:
            begun = await self._begin(grant)
        for trajectory in begun:
            self._batch.add(self._batch.one(trajectory))

    # ---- asking for work -----------------------------------------------------------------------------------

    async def _ask_for_more(self) -> None:
        """Once for each newest id and grant, and again when there is twice the room. An engine that does not
        say how full it is gets nothing."""
        used = await self._batch.engines.current.utilization()
        if used is None:
            return
        at_work = self._state.in_flight - len(self._batch.waiting)
        room = refill.room(at_work, used.queued, used.kv_tokens, used.kv_capacity, self._requests_max)
        asked = (self._state.weight_id, self._grants.newest_batch)
        if room >= self._samples and (asked != self._asked or room >= 2 * self._room_asked):
            self.ask(room)

    def ask(self, room: int | None = None) -> None:
        """For work on the newest weights, without a number for as much as an idle replica can begin."""
        weight_id, newest_batch = self._state.weight_id, self._grants.newest_batch
        assert weight_id is not None
        self._asked = weight_id, newest_batch
        self._room_asked = self._requests_max if room is None else room
        self._batch.context.channel.send(RequestWork(weight_id, newest_batch, self._room_asked))

    def forget(self) -> None:
        """The controller does not know what was asked of an earlier one."""
        self._asked = None
