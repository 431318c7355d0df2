"""A replica on a machine that is taken back, for bench/anywhere.py.

    spot_replica.py RUN_DIR INDEX LEDGER NOTICE

Its emulated engine keeps count of what it draws, and of what it prefills of that, in the file LEDGER; it
leaves at the notice in the file NOTICE. The rest is the product's.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path

from laminar_hpc.config.load import read_config
from laminar_hpc.engine.interface import Generation, Prompt, SamplingParameters
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.line.context import RoleContext
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.rollout.worker import RolloutWorker
from laminar_hpc.simulator.emulated.engine import EmulatedEngine
from laminar_hpc.simulator.emulation.fleet import EmulatedReplica

WRITE_SECONDS = 0.05  # between two counts on disk: what a killed replica has drawn since is not counted


class CountingEngine(EmulatedEngine):
    """See EmulatedEngine."""

    drawn = prefilled = 0

    async def generate(
        self, prompt_tokens: Prompt, sampling: SamplingParameters, *given: object, **more: object
    ) -> Generation:
        first = self.config.sampling.max_response_tokens - sampling["max_new_tokens"]
        generation = await super().generate(prompt_tokens, sampling, *given, **more)
        self.drawn += len(generation.tokens)
        if first:
            self.prefilled += max(0, first - generation.cached_tokens)
        return generation

    def counted(self) -> dict[str, int]:
        running = sum(job.generated(self._replica) - job.first for job in self._jobs.values())
        return {"drawn": self.drawn + running, "prefilled": self.prefilled}


async def run(run_dir: Path, index: int, ledger: Path, notice: Path) -> None:
    config = read_config(run_dir / "config.yaml")
    config.cluster.preemption_notice = str(notice)
    engines: list[CountingEngine] = []

    def new_engine(context: RoleContext) -> CountingEngine:
        engines.append(CountingEngine(context.config, context.index, context.run_dir))
        return engines[-1]

    def new_worker(context: RoleContext, pool: RewardPool) -> RolloutWorker:
        return RolloutWorker(context, lambda: new_engine(context), pool)

    def write() -> None:
        temporary = ledger.with_suffix(".new")
        temporary.write_text(json.dumps([engine.counted() for engine in engines]))
        temporary.replace(ledger)

    async def write_on() -> None:
        while True:
            write()
            await asyncio.sleep(WRITE_SECONDS)

    pool, writing = RewardPool(config.reward, config.data.prompt_field), asyncio.create_task(write_on())
    await pool.start()
    try:
        await EmulatedReplica(config, index, pool, new_worker).run()
    finally:
        writing.cancel()
        await pool.close()
        write()


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])))
