"""refresh=interrupt: a local batch into which newer weights come as soon as they are there.

    newer weights -> all stands still -> pulled, verified, opened -> all goes on

Owned by worker.py.
"""

import asyncio

from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.served_weights import ServedWeights


class Interruptible:
    """Looks for newer weights whenever `wake` is set."""

    def __init__(self, batch: LocalBatch, trace: Trace, wake: asyncio.Event, weights: ServedWeights) -> None:
        self._batch = batch
        self._trace = trace
        self._wake = wake
        self._weights = weights
        self._pulling = asyncio.Lock()

    async def run(self, begun: list[TrajectoryInFlight]) -> None:
        """Does what LocalBatch.run does; also raises what ends a pull."""
        batch, watch = asyncio.create_task(self._batch.run(begun)), asyncio.create_task(self._interrupt())
        try:
            await asyncio.wait((batch, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()  # a pull that failed
            await batch
            async with self._pulling:  # a pull that has begun is completed
                watch.cancel()
        finally:
            for task in (batch, watch):
                task.cancel()
            await asyncio.gather(batch, watch, return_exceptions=True)

    async def _interrupt(self) -> None:
        while True:
            self._wake.clear()
            if self._weights.newer():
                async with self._pulling:
                    with self._trace.span("wait", what="interruption"):
                        await self._batch.pause()
                    await self._weights.pull(interrupted=True)
                    self._batch.resume()
            else:
                await self._wake.wait()
