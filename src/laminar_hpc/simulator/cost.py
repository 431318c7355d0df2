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
from laminar_hpc.simulator.tables import Gpu, Model

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NO_TIME = {"time": False}  # a field that is no time, which a faster machine leaves as it is
_EXACT = 8  # requests up to which every batch has its own CUDA graph


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """A replica's seconds. A decode step of N requests with K tokens of KV takes `at(N)` + K * kv_token, and
    no less than `floor`.

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
    floor: float = 0.0
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
        return self.overhead + requests * self.request + (weights if weights > compute else compute)

    def step(self, requests: float, kv_tokens: float) -> float:
        """Seconds of one decode step."""
        return max(self.floor, self.at(round(requests)) + kv_tokens * self.kv_token)

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
    return model.layers * model.attention_width / model.active_parameters


def exchange_seconds(model: Model, gpu: Gpu, tensor: int, c: Constants) -> float:
    """One all-reduce of a token's hidden state over t GPUs: 2 (t - 1) / t of its bytes on each link."""
    return 2.0 * (tensor - 1) / tensor * 2.0 * model.hidden / (c.nvlink_efficiency * gpu.nvlink)


def engine_costs(
    model: Model, gpu: Gpu, tensor_parallel: int, c: Constants, cuda_graphs: bool = True
) -> EngineCosts:
    """Seconds of one replica's work, from the GPU's rates and the model's size."""
    bandwidth = gpu.hbm * tensor_parallel
    weights = c.decode_hbm_efficiency * bandwidth
    flops = gpu.flops * tensor_parallel
    exchanges = 2 * model.layers if tensor_parallel > 1 else 0  # per step
    exchange = exchanges * exchange_seconds(model, gpu, tensor_parallel, c)
    prefill_token = 2.0 * model.active_parameters / (c.prefill_mfu * flops)
    kv_copies = max(1.0, tensor_parallel / model.kv_heads)  # beyond one rank per KV head heads are copied
    layer = c.decode_layer_seconds if gpu.decode_layer is None else gpu.decode_layer
    return EngineCosts(
        overhead=model.layers * layer + exchanges * c.decode_allreduce_seconds,
        weights=2.0 * model.read_parameters / weights,
        kv_token=model.kv_bytes * kv_copies / (c.decode_kv_efficiency * bandwidth),
        compute=2.0 * model.active_parameters / (c.decode_flops_efficiency * flops),
        request=exchange + c.decode_request_seconds,
        prefill_token=prefill_token,
        prefill_attention=prefill_token * attention_share(model),
        pull=c.pull_overhead + 2.0 * model.parameters / (gpu.pcie * tensor_parallel),
        global_sync=c.pull_overhead + 2.0 * model.parameters / c.global_sync_bytes_per_second,
        move_token=model.kv_bytes / c.kv_move_bytes_per_second,
        move_latency=c.kv_move_latency,
        restart=c.replica_restart,
        floor=0.0 if cuda_graphs else model.layers * c.eager_layer_seconds,
        experts=2.0 * model.expert_parameters / weights,
        expert_miss=1.0 - model.expert_share,
    )


def kv_capacity(model: Model, gpu: Gpu, tensor_parallel: int, share: float) -> int:
    """KV tokens of a replica: `share` of its memory less the weights; 0 or less when they do not fit."""
    return kv_tokens_that_fit(
        2.0 * model.parameters, model.kv_bytes, model.kv_heads, tensor_parallel, share * gpu.memory
    )


def chain_seconds(weights_bytes: float, relays: int, c: Constants) -> float:
    """T* of the chunked chain broadcast (Laminar, relay tier)."""
    size, start = weights_bytes / c.chain_bytes_per_second, c.chain_chunk_seconds
    return (math.sqrt(size) + math.sqrt(max(0, relays - 2) * start)) ** 2
