"""From hardware and model to seconds: all that the event loop knows of either. Constants: constants.py.

Every field of `EngineCosts` and `JobCosts` is in seconds, so that a machine with all rates doubled is one
with every field halved.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeVar

from laminar_hpc.config.models import known_models, kv_heads, kv_tokens_that_fit, state_bytes
from laminar_hpc.simulator.constants import GPUS_PER_MACHINE, HEAD_SIZE, Constants, Gpu, Model


@dataclass(frozen=True)
class EngineCosts:
    """A replica's seconds. A decode step of N requests with K tokens of KV takes overhead + max(weights + K *
    kv_token, N * compute)."""

    overhead: float
    weights: float
    kv_token: float
    compute: float
    prefill_token: float
    prefill_attention: float  # per squared token
    pull: float
    global_sync: float
    move_token: float
    move_latency: float
    restart: float

    def step(self, requests: float, kv_tokens: float) -> float:
        return self.overhead + max(self.weights + kv_tokens * self.kv_token, requests * self.compute)

    def prefill(self, tokens: float, cached: float) -> float:
        """Of a context of `tokens`, the first `cached` of which have KV."""
        return (tokens - cached) * (self.prefill_token + self.prefill_attention * (tokens + cached))


@dataclass(frozen=True)
class JobCosts:
    """Everybody else's seconds."""

    train_token: float  # forward and backward, all GPUs together
    train_attention: float  # the same per squared token of a trajectory
    logprob_token: float  # the extra forward passes
    logprob_attention: float
    handling: float  # one process handles the batch: per trajectory
    update: float
    publish_stall: float
    chain: float
    switch: float
    checkpoint: float
    job_restart: float
    repack_period: float
    turn_scale: float = 1.0  # environment latencies are multiplied by this


@dataclass(frozen=True)
class Layout:
    """The trainer's GPUs: tensor parallelism, pipeline stages, data-parallel ranks."""

    tensor: int
    stages: int
    ranks: int


Costs = TypeVar("Costs", EngineCosts, JobCosts)


def faster(costs: Costs, factor: float) -> Costs:
    """The same with every rate `factor` times as high."""
    return dataclasses.replace(
        costs, **{field.name: getattr(costs, field.name) / factor for field in dataclasses.fields(costs)}
    )


def attention_share(model: Model) -> float:
    """FLOPs of causal attention as a share of a forward pass's 2 P, per token of a sequence: 2 layers x width
    x s^2 over 2 P s."""
    return model.layers * model.heads * HEAD_SIZE / model.parameters


def trainer_layout(model: Model, gpu: Gpu, gpus: int, c: Constants) -> Layout | None:
    """The layout of a published system, whose activations are not known to us: TP as wide as a machine and
    the heads allow, since data-parallel ranks wait for each other; then the fewest pipeline stages whose GPUs
    hold weights, gradients and optimizer in their share of the memory. None: no number does. `trainer_fit.py`
    has the layout of a run of our own."""
    tensor = max(tp for tp in (1, 2, 4, 8) if gpus % tp == 0 and model.heads % tp == 0)
    for stages in (1, 2, 4, 8):
        if gpus % (tensor * stages):
            continue
        ranks = gpus // (tensor * stages)
        held = state_bytes(
            model.parameters / (tensor * stages), 6.0, c.trainer_bytes_per_parameter - 6.0, ranks
        )
        if held <= c.trainer_memory_share * gpu.memory:
            return Layout(tensor, stages, ranks)
    return None


def engine_costs(model: Model, gpu: Gpu, tensor_parallel: int, c: Constants) -> EngineCosts:
    """Seconds of one replica's work, from the GPU's rates and the model's size."""
    weights_bytes = 2.0 * model.parameters
    bandwidth = c.decode_hbm_efficiency * gpu.hbm * tensor_parallel
    prefill_token = 2.0 * model.parameters / (c.prefill_mfu * gpu.flops * tensor_parallel)
    pull = c.pull_overhead + weights_bytes / (gpu.pcie * tensor_parallel)
    return EngineCosts(
        overhead=c.decode_overhead_per_layer * model.layers,
        weights=weights_bytes / bandwidth,
        kv_token=model.kv_bytes / bandwidth,
        compute=2.0 * model.parameters / (c.decode_flops_efficiency * gpu.flops * tensor_parallel),
        prefill_token=prefill_token,
        prefill_attention=prefill_token * attention_share(model),
        pull=pull,
        global_sync=pull * c.global_sync_factor,
        move_token=model.kv_bytes / c.kv_move_bytes_per_second,
        move_latency=c.kv_move_latency,
        restart=c.replica_restart,
    )


def kv_capacity(model: Model, gpu: Gpu, tensor_parallel: int, share: float) -> int:
    """KV tokens of a replica: `share` of its memory less the weights; 0 or less when they do not fit."""
    heads = kv_heads(known_models()[model.hf])
    return kv_tokens_that_fit(
        2.0 * model.parameters, model.kv_bytes, heads, tensor_parallel, share * gpu.memory
    )


def chain_seconds(weights_bytes: float, relays: int, c: Constants) -> float:
    """T* of the chunked chain broadcast (Laminar, relay tier)."""
    size, start = weights_bytes / c.chain_bytes_per_second, c.chain_chunk_seconds
    return (math.sqrt(size) + math.sqrt(max(0, relays - 2) * start)) ** 2


def job_costs(
    model: Model,
    trainer_gpu: Gpu,
    trainer_gpus: int,
    layout: Layout,
    rollout_gpus: int,
    cap: int,
    c: Constants,
) -> JobCosts:
    """`cap`: tokens of the longest response allowed."""
    model_parallel = layout.tensor * layout.stages
    weights_bytes = 2.0 * model.parameters
    pass_token = 2.0 * model.parameters / (c.train_mfu * trainer_gpu.flops * trainer_gpus)
    return JobCosts(
        train_token=3.0 * pass_token,
        train_attention=3.0 * pass_token * attention_share(model),
        logprob_token=c.logprob_passes * pass_token,
        logprob_attention=c.logprob_passes * pass_token * attention_share(model),
        handling=(1.0 + c.logprob_passes) * c.batch_handling * cap,
        # A machine's NICs carry one copy of the model, or its part of one.
        update=c.gradient_bytes_per_parameter
        * model.parameters
        / (max(GPUS_PER_MACHINE, model_parallel) * trainer_gpu.nic),
        publish_stall=weights_bytes / c.publish_bytes_per_second,
        chain=chain_seconds(weights_bytes, math.ceil(rollout_gpus / GPUS_PER_MACHINE), c),
        switch=c.colocated_switch,
        checkpoint=c.checkpoint_stall,
        job_restart=c.job_restart,
        repack_period=c.repack_period,
    )
