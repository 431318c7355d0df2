"""What lies beside an adapter in its slot, so that the slot is a directory as PEFT writes it."""

import json

from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.weights.adapters import adapter_config


def side_files(config: RunConfig) -> dict[str, bytes] | None:
    """The files' contents by name; None where a run publishes full weights, whose slots have those of
    model.path."""
    if config.model.lora.rank == 0:
        return None
    settings = adapter_config(config.model.lora, config.model.path)
    return {ADAPTER_CONFIG_FILE: json.dumps(settings, indent=1).encode()}
