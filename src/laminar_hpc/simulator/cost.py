"""From hardware and model to seconds: all that the event loop knows of either. Constants: constants.py.

Every field of `EngineCosts` and of `trainer_cost.JobCosts` is in seconds unless it says otherwise, so that
a machine with all rates doubled is one with every field halved.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from laminar_hpc.config.models import kv_tokens_that_fit
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.kernels import eager_seconds, products_efficiency, weights_rate
from laminar_hpc.simulator.links import decode_reduce, global_sync_seconds
from laminar_hpc.simulator.tables import Gpu, Model

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NO_TIME = {"time": False}  # a field that is no time, which a faster machine leaves as it is
_EXACT = 8  # requests up to which every batch has its own CUDA graph


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """A replica's seconds. A decode step of N requests with K tokens of KV takes `at(N)` + K * kv_token, and
    no less than `least(N)`.

    `experts`: reading all routed experts; a token misses each of them with probability `expert_miss`, and a
    step reads those that at least one of its tokens uses.
    """

    overhead: float
    weights: float = 0.0
    kv_token: float = 0.0
    compute: float = 0.0  # of a request's token: matrix products
    request: float = 0.0  # the same: what they don't overlap with
    prefill_token: float = 0.0
    prefill_attention: float = 0.0  # per squared token
    pull: float = 0.0
    global_sync: float = 0.0
    move_token: float = 0.0
    move_latency: float = 0.0
    restart: float = 0.0
    floor: float = 0.0  # launches of a step without CUDA graphs, which the GPU's work hides, or they it
    floor_request: float = 0.0  # of a request, beside the launches: the same host's
    host: float = 0.0  # of a request, between two steps: nothing hides it
    ask: float = 0.0  # a turn's request on its way to the engine, where trajectories have several
    experts: float = 0.0
    expert_miss: float = field(default=0.0, metadata=_NO_TIME)

    def at(self, requests: int) -> float:
        """A step of so many requests without their KV. CUDA graphs are captured for multiples of eight
        (SGLang, vLLM): a batch in between computes as much as the next."""
        padded = (requests + 7) & ~7 if requests > _EXACT else requests
        weights = self.weights
        if self.experts:
            weights += self.experts * (1.0 - self.expert_miss**requests)
        compute = padded * self.compute
        each = requests * (self.request + self.host)
        return self.overhead + each + (weights if weights > compute else compute)

    def least(self, requests: int) -> float:
        """No step of so many requests is shorter, however little the GPU has to do."""
        return self.floor + requests * (self.floor_request + self.host)

    def step(self, requests: float, kv_tokens: float) -> float:
        """Seconds of one decode step."""
        n = round(requests)
        return max(self.least(n), self.at(n) + kv_tokens * self.kv_token)

    def prefill(self, tokens: float, cached: float) -> float:
        """Seconds to prefill `tokens`, of which the first `cached` have KV."""
        return (tokens - cached) * (self.prefill_token + self.prefill_attention * (tokens + cached))


Costs = TypeVar("Costs", bound="DataclassInstance")


def faster(costs: Costs, factor: float) -> Costs:
    """The same with every rate `factor` times as high."""
    times = [field for field in dataclasses.fields(costs) if field.metadata.get("time", True)]
    return dataclasses.replace(costs, **{field.name: getattr(costs, field.name) / factor for field in times})


def attention_share(model: Model) -> float:
    """FLOPs of causal attention as a share of a forward pass's 2 P, per token of a sequence: 2 layers x width
    x s^2 over 2 P s."""
    return model.attention_layers * model.attention_width / model.active_parameters


def engine_costs(
    model: Model,
    gpu: Gpu,
    tensor_parallel: int,
    c: Constants,
    cuda_graphs: bool = True,
    engine: str = "sglang",
) -> EngineCosts:
    """Seconds of one replica's work, from the GPU's rates and the model's size. The global synchronisation is
    with a trainer on a machine of the same GPUs. SGLang's host prepares the next step while the GPU works and
    without CUDA graphs it launches that step's kernels as well; that of `engine` vllm waits for each step."""
    weights = weights_rate(gpu, c) * tensor_parallel
    flops = gpu.flops * tensor_parallel
    reduces = 2 * model.layers
    latency, exchange = decode_reduce(model, gpu, tensor_parallel, c)
    prefill_token = 2.0 * model.active_parameters / (products_efficiency(gpu, c.prefill_mfu) * flops)
    layer = c.decode_layer_seconds if gpu.decode_layer is None else gpu.decode_layer
    layer = max(layer, c.decode_latent_layer_seconds) if model.latent else layer
    state = 2.0 * model.state_bytes / (c.decode_state_efficiency * gpu.hbm * tensor_parallel)
    waits = engine == "vllm"
    costs = EngineCosts(
        overhead=model.layers * layer + reduces * latency,
        weights=2.0 * model.read_parameters / weights,
        kv_token=kv_token_seconds(model, gpu, tensor_parallel, c),
        compute=2.0 * model.active_parameters / (products_efficiency(gpu, c.decode_flops_efficiency) * flops),
        request=reduces * exchange + state,
        prefill_token=prefill_token,
        prefill_attention=prefill_token * attention_share(model),
        pull=c.pull_overhead + 2.0 * model.parameters / (gpu.pcie * tensor_parallel),
        global_sync=global_sync_seconds(model, gpu, gpu.machine, gpu, gpu.machine, c),
        move_token=model.kv_bytes / c.kv_move_bytes_per_second,
        move_latency=c.kv_move_latency,
        restart=c.replica_restart,
        floor=0.0 if cuda_graphs else eager_seconds(model, c),
        floor_request=0.0 if cuda_graphs or waits else c.decode_request_seconds,
        host=c.decode_request_seconds if waits else 0.0,
        experts=2.0 * model.expert_parameters / weights,
        expert_miss=1.0 - model.expert_share,
    )
    return costs if c.generation_error == 1.0 else _slower(costs, c.generation_error, _reached(gpu, c))


def kv_token_seconds(model: Model, gpu: Gpu, tensor: int, c: Constants) -> float:
    """Of a decode step, for each token of KV on all ranks: it is read, and each rank's heads score it. Beyond
    one rank for each KV head heads are copied, so that every rank reads a latent whole."""
    copies = max(1.0, tensor / model.kv_heads)
    read = model.kv_bytes * copies / (c.decode_kv_efficiency * gpu.hbm * tensor)
    return max(read, model.kv_flops / (c.decode_attention_efficiency * gpu.flops * tensor))


_OF_TOKENS = ("overhead", "weights", "kv_token", "compute", "request", "prefill_token", "prefill_attention")


def _reached(gpu: Gpu, c: Constants) -> dict[str, float]:
    """Shares of the datasheet's rates that are taken: so much shorter its seconds may be at most."""
    weights, prefill = weights_rate(gpu, c) / gpu.hbm, products_efficiency(gpu, c.prefill_mfu)
    return {
        "weights": weights,
        "experts": weights,
        "kv_token": max(c.decode_kv_efficiency, c.decode_attention_efficiency),
        "compute": products_efficiency(gpu, c.decode_flops_efficiency),
        "prefill_token": prefill,
        "prefill_attention": prefill,
    }


def _slower(costs: EngineCosts, factor: float, reached: dict[str, float]) -> EngineCosts:
    """Everything that tokens take `factor` times as long, and nothing faster than the datasheet's rates."""
    names = (*_OF_TOKENS, "floor", "floor_request", "host", "experts")
    longer = {name: getattr(costs, name) * max(factor, reached.get(name, 0.0)) for name in names}
    return dataclasses.replace(costs, **longer)


def kv_capacity(model: Model, gpu: Gpu, tensor_parallel: int, share: float, requests: int = 0) -> int:
    """KV tokens of a replica: `share` of its memory less the weights, and less the states of `requests` in
    layers of linear attention; 0 or less when they do not fit."""
    fixed = 2.0 * model.parameters + requests * model.state_bytes
    return kv_tokens_that_fit(fixed, model.kv_bytes, model.kv_heads, tensor_parallel, share * gpu.memory)


def chain_seconds(weights_bytes: float, relays: int, c: Constants) -> float:
    """T* of the chunked chain broadcast (Laminar, relay tier)."""
    size, start = weights_bytes / c.chain_bytes_per_second, c.chain_chunk_seconds
    return (math.sqrt(size) + math.sqrt(max(0, relays - 2) * start)) ** 2
