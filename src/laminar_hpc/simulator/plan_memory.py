"""What a plan's engines have for their KV cache, by the count by which a run is refused (config/memory.py):
beside the weights there are places for adapters, relays, moves, CUDA's graphs and contexts, and on a GPU that
the trainer shares the trainer."""

from laminar_hpc.config.adapter_places import adapter_pool_bytes
from laminar_hpc.config.check import derive, memory_need
from laminar_hpc.config.memory import GRAPH_BYTES, USABLE, move_bytes, relay_bytes, shared_bytes
from laminar_hpc.config.models import kv_tokens_that_fit
from laminar_hpc.config.schema import ModelConfig, RunConfig
from laminar_hpc.config.system_schema import PipelineConfig, RelayConfig, RolloutConfig, TrainerConfig
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.lora import trained_part
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.tables import MODELS, Gpu
from laminar_hpc.simulator.trainer_fit import SHARE

# of a publication per relay lane: 1, 2 and 4 lanes for 7B, 32B and 72B, as in conf/experiment
_LANE_BYTES = 36e9
_WIDTH = 2  # bytes of a bfloat16


def lanes(config: PlanConfig) -> int:
    return max(1, round(2 * trained_part(MODELS[config.model], config.lora).parameters / _LANE_BYTES))


def planned_run(config: PlanConfig, trainer: TrainerConfig, replicas: int, tensor: int) -> RunConfig:
    """What counts in memory of the run that a plan writes, without a KV cache."""
    model = MODELS[config.model]
    return RunConfig(
        dry_run=True,
        model=ModelConfig(path=model.path, dtype="bfloat16", lora=config.lora),
        trainer=trainer,
        relay=RelayConfig(lanes=lanes(config)),
        rollout=RolloutConfig(replicas=replicas, tensor_parallel=tensor, kv_cache_tokens=0),
        pipeline=PipelineConfig(refresh="drained", max_staleness=config.max_staleness),
    )


def engine_tokens(config: PlanConfig, gpu: Gpu, tensor: int, replicas: int = 1) -> int:
    """KV tokens of a replica on GPUs of its own; 0 or less: no room."""
    run = planned_run(config, TrainerConfig(), replicas, tensor)
    beside = relay_bytes(run) + move_bytes(run) + GRAPH_BYTES
    room = min(DEFAULT.kv_memory_share * gpu.memory, USABLE * gpu.memory - beside)
    return tokens_of(config, tensor, room - adapter_pool_bytes(run, MODELS[config.model].config, _WIDTH))


def tokens_of(config: PlanConfig, tensor: int, room: float) -> int:
    """KV tokens in `room` bytes of each GPU that weights and KV cache share."""
    model = MODELS[config.model]
    return kv_tokens_that_fit(2.0 * model.parameters, model.kv_bytes, model.kv_heads, tensor, room)


def shared_tokens(config: PlanConfig, gpu: Gpu, trainer: TrainerConfig) -> int:
    """KV tokens of a replica on the one GPU that `trainer` uses too; 0 or less: no room."""
    run = planned_run(config, trainer, 1, 1)
    need = memory_need(run, derive(run))
    weights = 2.0 * MODELS[config.model].parameters
    return tokens_of(config, 1, SHARE * gpu.memory - shared_bytes(need, 1) + weights)
