"""An engine (engine/interface.py) that only pretends, with continuous batching as the simulator models it.

It has no model and no weights: responses are invented (responses.py), sums are those of the slot's own
manifest, nothing is scored. Decode steps, prefill, KV capacity and preemption cost what LAMINAR's constants
say (decoding.py); KV caches that move cross a real socket (kv_wire.py) and are charged at their size. Many of
them fit into one process.
"""

from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import Sums, TensorLayout
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.simulator.emulated import kv_wire
from laminar_hpc.simulator.emulated.adapters import PULL_SHARE
from laminar_hpc.simulator.emulated.decoding import EmulatedDecoding, EmulatedRequest
from laminar_hpc.simulator.emulated.weights import weights_file
from laminar_hpc.weights.manifest import MANIFEST_FILE, decode_manifest

_WIRE_SECONDS = 30.0  # maximum time for one frame to cross


class EmulatedEngine(EmulatedDecoding):
    """Each method does what Engine says of it; the seed of `start` means nothing."""

    def __init__(self, config: RunConfig, index: int, run_dir: Path) -> None:
        super().__init__(config, index, run_dir)
        self._manifest: Path | None = None
        self._endpoint = kv_wire.Endpoint()
        self._link_free = 0.0  # emulated seconds: the network card is one
        self._reserved: dict[str, int] = {}  # move -> tokens
        self._sent: dict[str, tuple[str, int, int]] = {}  # move -> (address, trajectory, tokens sent)

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self, directory: Path, weight_id: int | None, seed: int) -> float:
        self._open(directory, weight_id)
        return 0.0

    async def stop(self) -> None:
        self._stop_timer()
        for job in self._jobs.values():
            job.future.cancel()
        await self._endpoint.stop()

    # ---- weights -------------------------------------------------------------------------------------------

    def _open(self, directory: Path, weight_id: int | None) -> None:
        self.weight_id = weight_id
        self._manifest = directory / MANIFEST_FILE
        self._warm.clear()
        self._came.clear()

    async def load_weights(self, directory: Path, weight_id: int, paused: bool = False) -> Sums:
        """See Engine. It takes the simulator's time for a pull."""
        self._settle()
        await self._pass(self.costs.pull)
        for job in self._jobs.values():  # paused ones
            job.spans.append((self._served(), job.generated(self._replica)))
        self._open(directory, weight_id)
        self._replica.prompts.clear()
        return await self.sums()

    async def load_adapter(self, directory: Path, weight_id: int) -> Sums:
        """See Engine. It takes a small part of the simulator's time for a pull."""
        await self._pass(self.costs.pull * PULL_SHARE)
        self.adapters.add(weight_id)
        return _sums(directory / MANIFEST_FILE)

    async def unload_adapter(self, weight_id: int) -> None:
        self._settle()
        self.adapters.remove(weight_id, sum(job.adapter == weight_id for job in self._jobs.values()))

    async def layout(self) -> list[TensorLayout]:
        """The tensors of model.path's safetensors files, in the serving dtype."""
        shapes, _ = weights_file(Path(self.config.model.path))
        return [TensorLayout(name, shape, self.config.model.dtype) for name, shape in shapes]

    async def sums(self) -> Sums:
        """The sums of the manifest that the engine was given: it holds no weights to add up."""
        assert self._manifest is not None
        return _sums(self._manifest)

    async def score(self, sequences: list[list[int]], namespace: str) -> list[list[float]]:
        """Gives nothing: the engine has no model."""
        self.adapters.named(namespace)
        return []

    async def decode_curve(self, max_requests: int, context: int) -> list[tuple[int, float]]:
        """The curve by the engine's costs; nothing has to be measured."""
        points = sorted({min(1 << power, max_requests) for power in range(max_requests.bit_length() + 1)})
        return [(n, self.costs.step(n, n * context) / self.scale) for n in points]

    async def profile(self, folder: Path) -> None:
        """Writes nothing: the engine computes nothing."""

    # ---- moves ---------------------------------------------------------------------------------------------

    async def kv_reserve(self, move_id: str, weight_id: int, tokens: int) -> str:
        self._settle()
        served = {self.weight_id} if self.adapters.loaded is None else self.adapters.loaded
        if weight_id not in served:
            raise KvRefused(
                f"KV move {move_id} refused: it is of weight id "
                f"{weight_id}, {self.name} serves {', '.join(map(str, sorted(served, key=str))) or 'none'}"
            )
        if self._replica.kv + sum(self._reserved.values()) + tokens > self._replica.capacity:
            raise KvRefused(f"KV move {move_id} refused: {self.name} has no room for {tokens} tokens")
        self._reserved[move_id] = tokens
        return await self._endpoint.open(move_id)

    async def kv_send(self, move_id: str, request_id: str, address: str) -> None:
        job = self._job(move_id, request_id)
        self._sent[move_id] = (address, job.trajectory_id, 0)
        await self._ship(move_id, self._context(job))

    async def kv_detach(self, move_id: str, request_id: str) -> int:
        job = self._job(move_id, request_id)
        if move_id not in self._sent:
            raise KvRefused(f"KV move {move_id} refused: nothing was sent before")
        self._take(job)
        context = self._context(job)
        self._warm[job.trajectory_id] = context
        self._end(job, "moved")
        self._settle()
        await self._ship(move_id, context)
        return context

    async def kv_send_kept(self, move_id: str, tokens: list[int], namespace: str, address: str) -> int:
        """See Engine. The move's id begins with the trajectory's, by which KV is kept here."""
        self._settle()
        trajectory_id = int(move_id.split("-")[0])
        if not (context := min(self._warm.get(trajectory_id, 0), len(tokens))):
            raise KvRefused(f"KV move {move_id} refused: nothing of it is in the prefix cache")
        self._sent[move_id] = (address, trajectory_id, 0)
        await self._ship(move_id, context)
        return context

    def _job(self, move_id: str, request_id: str) -> EmulatedRequest:
        self._settle()
        job = self._jobs.get(request_id)
        if job is None or job.future.done():
            raise KvRefused(f"KV move {move_id} refused: {request_id} is not running")
        return job

    async def _ship(self, move_id: str, context: int) -> None:
        """Tokens that have not gone yet: bytes cross the socket, time passes on this engine's network."""
        address, trajectory_id, first = self._sent[move_id]
        count = context - first
        if count <= 0:
            return
        begin = max(self._now(), self._link_free)
        self._link_free = begin + count * self.costs.move_token
        body = int(count * self.model.kv_bytes * self.config.emulation.wire_share)
        await kv_wire.send(address, move_id, first, count, body, _WIRE_SECONDS)
        await self._pass(max(0.0, self._link_free - self._now()))
        self._sent[move_id] = (address, trajectory_id, context)

    async def kv_import(self, move_id: str, tokens: list[int], routes: bytes = b"") -> int:
        offer = self._endpoint.offer(move_id)
        if offer is None or move_id not in self._reserved:
            raise KvRefused(f"KV move {move_id} refused: it was not reserved at {self.name}")
        await self._pass(self.costs.move_latency)
        if offer.tokens > len(tokens) + 1:
            raise KvRefused(f"KV move {move_id} refused: KV of {offer.tokens} tokens came for {len(tokens)}")
        prefix = min(offer.tokens, len(tokens))
        self._came[hash(tuple(tokens))] = prefix
        self._warm[int(move_id.split("-")[0])] = prefix  # it waits for a tool: its next prompt is longer
        return prefix

    async def kv_commit(self, move_id: str) -> None:
        if move_id in self._sent:
            self._warm.pop(self._sent[move_id][1], None)
        self._let_go(move_id)

    async def kv_abort(self, move_id: str) -> None:
        self._let_go(move_id)

    def _let_go(self, move_id: str) -> None:
        self._reserved.pop(move_id, None)
        self._sent.pop(move_id, None)
        self._endpoint.close(move_id)


def _sums(manifest: Path) -> Sums:
    """Those that the manifest's file has."""
    return {t.name: (t.sum_words, t.sum_indexed) for t in decode_manifest(manifest.read_bytes()).tensors}
