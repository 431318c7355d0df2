"""How many adapters a run keeps at once, in engines and in relays' slots, and the memory that they take."""

from laminar_hpc.config.adapters import published_parameters
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.system_schema import PipelineConfig

_UNBOUNDED = 2  # taken for pipeline.max_staleness where there is none


def adapters_at_once(pipeline: PipelineConfig) -> int:
    """The number of adapters that an engine has places for: those that a trajectory may still be of, the
    newest, and one that arrives."""
    return (_UNBOUNDED if pipeline.staleness_max is None else pipeline.staleness_max) + 3


def slots_of(config: RunConfig) -> int:
    """Slots of a relay: adapters are small enough for all that somebody may still need."""
    if config.model.lora.rank == 0:
        return config.relay.slots
    return max(config.relay.slots, adapters_at_once(config.pipeline))


def adapter_pool_bytes(config: RunConfig, model: dict, width: int) -> int:
    """Bytes of the places for adapters on an engine's GPU, one of them of the model without an adapter, as if
    no tensor-parallel rank had less; 0 without adapters. `width`: bytes of a parameter."""
    if config.model.lora.rank == 0:
        return 0
    places = adapters_at_once(config.pipeline) + 1
    return places * published_parameters(model, config.model.lora) * width
