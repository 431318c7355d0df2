"""The rollout role: `run(context)` is what its rank executes. The replica is worker.py; a thread watches that
its event loop turns."""

import asyncio
import os

from laminar_hpc.engine.factory import engine_factory
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.membership import Failure
from laminar_hpc.machine.files.open_files import allow_files
from laminar_hpc.machine.loop_watch import LoopWatch
from laminar_hpc.rollout import event_loop
from laminar_hpc.rollout.worker import RolloutWorker

# of the event loop's turns: files are looked at and tokenizers run in it, each for a moment
LOOP_SECONDS, LOOP_SECONDS_MAX = 60.0, 600.0
# of 1,024 environments each a process and what agents connect by, of the engine each request a connection
_FILES = 16_384


def run(context: RoleContext) -> None:
    """Serves until the controller says Stop, or this process is told to end (shutdown.py). Raises
    LaminarError when the replica cannot go on."""
    allow_files(_FILES)
    new_engine = engine_factory(context.config, context.index, context.run_dir)
    event_loop.run(watched(RolloutWorker(context, new_engine)))


async def watched(worker: RolloutWorker) -> None:
    """The worker's life. When its event loop stands still, this process says so to the controller and
    ends: others go on with what it had."""
    channel, index = worker.context.channel, worker.context.index

    def stuck(text: str) -> None:  # in the watch's thread
        channel.send(Failure(text))
        channel.close(goodbye=False)
        os._exit(1)

    watch = LoopWatch(f"the event loop of rollout {index}", LOOP_SECONDS, LOOP_SECONDS_MAX, stuck)
    turns = asyncio.create_task(_turn_for(watch))
    try:
        await worker.run()
    finally:
        turns.cancel()
        watch.close()


async def _turn_for(watch: LoopWatch) -> None:
    while True:
        watch.turned()
        await asyncio.sleep(1.0)
