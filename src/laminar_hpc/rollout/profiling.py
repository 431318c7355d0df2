"""A profile of replica 0's engine, for observability.profile: of the first local batch that is generated on
weights of the trainer's, so behind the first update."""

import logging

from laminar_hpc.engine.interface import RequestFailed
from laminar_hpc.line.context import RoleContext
from laminar_hpc.rollout.engine_lives import EngineLives

log = logging.getLogger(__name__)


class EngineProfile:
    """Asked once before each local batch."""

    def __init__(self, context: RoleContext, engines: EngineLives) -> None:
        self._folder = context.run_dir / "profile"
        self._engines = engines
        self._due = context.index == 0 and context.config.observability.profile > 0

    async def before(self, weight_step: int) -> None:
        """Begins it where it is due; the engine ends it. Raises EngineDied."""
        if not self._due or weight_step < 1:
            return
        self._due = False
        try:
            await self._engines.current.profile(self._folder)
        except RequestFailed as error:
            log.warning("the engine is not profiled: %s", error)
