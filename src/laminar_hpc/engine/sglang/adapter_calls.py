"""An SGLang engine's adapters, see Engine: loaded and unloaded through the port, named by each request."""

import asyncio
import time
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import BASE, Sums
from laminar_hpc.engine.sglang.move_calls import MoveCalls
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.shards import whole_sums, whole_tensors

LOAD_SECONDS = 120.0  # maximum wait for the megabytes of one adapter
# the scheduler needs a turn of its loop, some milliseconds, to put away the last request that it answered
UNLOAD_SECONDS = 10.0


class AdapterCalls(MoveCalls):
    """The base of SglangServer that has its adapters. `adapters`: those loaded, by weight id, the oldest
    first; None without model.lora."""

    adapters: list[int] | None

    def naming(self, namespace: str) -> dict[str, Any]:
        """Of a request's payload: who draws, and whose KV it may reuse. SGLang puts an adapter's id into the
        cache's keys by itself."""
        return (
            {"extra_key": namespace} if self.adapters is None or namespace == BASE else {"lora_id": namespace}
        )

    async def load_adapter(self, directory: Path, weight_id: int) -> Sums:
        """See Engine. What only some tensor-parallel ranks have taken is unloaded."""
        request = protocol.LoadAdapter(str(directory), weight_id)
        known = self._known()
        try:
            replies = await self.port.call(request, protocol.LiveAdapter, LOAD_SECONDS)
            shards = [reply.tensors for reply in replies]
            whole_tensors(shards)
            sums = whole_sums(shards, [reply.sums for reply in replies])
        except LaminarError:
            if weight_id not in known:
                await self._unload(weight_id)
            raise
        known.append(weight_id)
        return sums

    async def unload_adapter(self, weight_id: int) -> None:
        deadline = time.monotonic() + UNLOAD_SECONDS
        while (refused := await self._unload(weight_id)) is not None:
            if time.monotonic() > deadline:
                raise LaminarError(f"the engine refused to unload: {refused}")
            await asyncio.sleep(0.005)
        known = self._known()
        if weight_id in known:
            known.remove(weight_id)

    async def _unload(self, weight_id: int) -> str | None:
        """Why it was refused, or None."""
        request = protocol.UnloadAdapter(f"unload-{weight_id}", weight_id)
        reply = await self.port.call_beside(request, LOAD_SECONDS)
        return reply.text if isinstance(reply, protocol.OperationRefused) else None

    def _known(self) -> list[int]:
        if self.adapters is None:
            raise LaminarError("this engine was started without adapters; set model.lora.rank")
        return self.adapters
