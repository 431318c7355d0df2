"""Replicas that wait as batches do, for bench/environments.py: waiting_fleet.py RUN_DIR FIRST COUNT.

All that a replica generates waits for the slowest tool of each turn before anybody's next turn begins. The
rest is the product's: `laminar_hpc.simulator.emulation`.
"""

import asyncio
import logging
import sys
from pathlib import Path

from laminar_hpc.config.load import read_config
from laminar_hpc.environments.turns.conversation import ToolResult
from laminar_hpc.environments.turns.session import Session
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.rollout import worker
from laminar_hpc.rollout.batch import Turn
from laminar_hpc.rollout.episodes import Episodes
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.turn_calls import Found, TurnCalls
from laminar_hpc.simulator.emulation import fleet


class BatchCalls(TurnCalls):
    """See TurnCalls; results are given to all together."""

    running = _there = 0
    _all: asyncio.Event | None = None

    async def _results(self, session: Session | None, found: Found) -> list[ToolResult]:
        results = await super()._results(session, found)
        self._there += 1
        waits = self._all = self._all or asyncio.Event()
        self.look()
        await waits.wait()
        return results

    def look(self) -> None:
        if self._all is not None and self._there == self.running:
            self._all.set()
            self._all, self._there = None, 0


class BatchEpisodes(Episodes):
    """See Episodes."""

    Calls = BatchCalls
    calls: BatchCalls

    async def run(self, work: TrajectoryInFlight, turn: Turn) -> Outcome:
        """See Episodes."""
        self.calls.running += 1
        try:
            return await super().run(work, turn)
        finally:
            self.calls.running -= 1
            self.calls.look()


def main() -> None:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    worker.new_episodes = BatchEpisodes
    config = read_config(Path(sys.argv[1]) / "config.yaml")
    asyncio.run(fleet.run(config, int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
