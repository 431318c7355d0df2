"""Which engine a replica has: the one place that knows all kinds."""

from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import Engine, EngineFactory


def engine_factory(config: RunConfig, index: int, run_dir: Path) -> EngineFactory:
    """Makes engines of the kind `rollout.engine` for replica `index`, one per life. Called where a rollout
    worker is built."""

    def new_engine() -> Engine:
        if config.rollout.engine == "emulated":
            from laminar_hpc.engine.emulated.engine import EmulatedEngine

            return EmulatedEngine(config, index, run_dir)
        from laminar_hpc.engine.sglang.server import SglangServer

        return SglangServer(config, index, run_dir)

    return new_engine
