"""Which engine a replica has: the one place that knows all kinds."""

import pkgutil
from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import Engine, EngineFactory

# By name: the emulated engine stands on the simulator, above this room. Neither is loaded before it is used.
_ENGINES = {
    "sglang": "laminar_hpc.engine.sglang.server:SglangServer",
    "emulated": "laminar_hpc.simulator.emulated.engine:EmulatedEngine",
}


def engine_factory(config: RunConfig, index: int, run_dir: Path) -> EngineFactory:
    """Makes engines of the kind `rollout.engine` for replica `index`, one per life."""

    def new_engine() -> Engine:
        engine: Engine = pkgutil.resolve_name(_ENGINES[config.rollout.engine])(config, index, run_dir)
        return engine

    return new_engine
