"""The engine of a replica through its lives: one that fails is stopped, and a fresh one takes its place."""

from collections.abc import Callable
from pathlib import Path

from laminar_hpc.engine.interface import Engine, EngineFactory


class EngineLives:
    """`current`: the engine to use now; only the weight loader replaces it. `seed`: another for each life."""

    def __init__(self, new_engine: EngineFactory, seed: Callable[[], int]) -> None:
        self._new_engine = new_engine
        self._seed = seed
        self.current: Engine = new_engine()

    async def start(self, directory: Path, weight_id: int | None) -> float:
        """Starts `current`, see Engine.start."""
        return await self.current.start(directory, weight_id, self._seed())

    async def replace(self) -> None:
        """Stops `current` and makes the next one, which is not started yet."""
        await self.current.stop()
        self.current = self._new_engine()
