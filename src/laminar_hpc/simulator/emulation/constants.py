"""The names of emulation.constants, before anything starts."""

import dataclasses

from laminar_hpc.config.errors import did_you_mean
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.simulator.constants import Constants


def unknown_constants(config: RunConfig) -> list[str]:
    """One line for each entry that is no field of simulator/constants.py."""
    names = [field.name for field in dataclasses.fields(Constants)]
    return [
        f"emulation.constants.{name}: no such constant{did_you_mean(name, names)}; "
        "they are in simulator/constants.py"
        for name in config.emulation.constants
        if name not in names
    ]
