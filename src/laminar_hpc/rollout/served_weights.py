"""Which weights a replica serves, and how it comes to others: what state.py allows, the copy by
weight_loader.py, then the word to the controller.

    newer, or those that trajectories began with elsewhere -> pulled and verified -> open -> WeightsOpened

Owned by worker.py.
"""

import asyncio
import time

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.rollouts import WeightsOpened
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.reporting import UtilizationReporter
from laminar_hpc.rollout.weight_loader import WeightLoader
from laminar_hpc.weights.slots import SlotGone, SlotReader


class ServedWeights:
    """`keep_kv`: requests that stand still for other weights keep their KV cache."""

    def __init__(
        self, batch: LocalBatch, reader: SlotReader, loader: WeightLoader, reporter: UtilizationReporter
    ) -> None:
        self._context = batch.context
        self._reader = reader
        self._state = batch.state
        self._loader = loader
        self._reporter = reporter
        self._keep_kv = batch.keep_kv
        self._announced = -1  # the newest id that the controller has said to be here

    def announced(self, weight_id: int) -> None:
        """The controller knows that these weights are in a slot of this machine."""
        self._announced = max(self._announced, weight_id)

    def newest_id(self) -> int | None:
        """Of the slots."""
        newest = self._reader.newest()
        return newest.weight_id if newest is not None else None

    def newer(self) -> bool:
        """There are newer ones than are open."""
        newest_id = self.newest_id()
        return newest_id is not None and newest_id >= self._state.next_weight_id

    def due(self) -> bool:
        """There are newer ones, and the controller knows it: it grants nothing more on those that are open
        (controller/trajectories/dispatcher.py), so that no grant crosses a pull that begins now."""
        return self._announced >= self._state.next_weight_id and self.newer()

    async def until_first(self, since: float) -> None:
        """Returns when there is a slot. Raises LaminarError join_timeout_seconds after `since`."""
        limit, replica = self._context.config.cluster.join_timeout_seconds, self._context.index
        while self._reader.newest() is None:
            if time.monotonic() - since > limit:
                raise LaminarError(
                    f"rollout {replica} waited {limit:g} s for the first weights of its relay "
                    f"under {self._reader.root} and gave up: see the logs of the relay and of trainer 0"
                )
            await asyncio.sleep(0.05)

    async def pull(self, interrupted: bool = False, back_to: int | None = None) -> None:
        """The newest weights, or those of `back_to`. Raises SlotGone only with the latter."""
        newest = self._reader.newest()
        ahead = newest.weight_id if newest else self._state.next_weight_id
        self._state.begin_pull(ahead if back_to is None else back_to, interrupted, back=back_to is not None)
        try:
            beside = self._state.in_flight > 0 and not interrupted
            pulled = await self._loader.pull(interrupted and self._keep_kv, back_to, beside)
        except SlotGone:
            self._state.failed()
            raise
        await self._reporter.measure_curve()
        self._state.verified(pulled.weight_id)
        self._state.open(pulled.weight_step)
        if pulled.weight_id != self._state.weight_id:
            return  # older ones, beside the newest
        seconds, phases, probe = pulled.seconds, pulled.phases, pulled.probe_logprobs
        opened = WeightsOpened(pulled.weight_id, pulled.weight_step, seconds, phases, probe, time.time())
        opened.model_logprobs = pulled.model_logprobs
        self._context.channel.send(opened)
