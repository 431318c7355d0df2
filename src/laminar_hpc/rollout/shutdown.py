"""The shutdown of a replica that was told to end (SIGTERM: a preemption, scancel, the launch script's
Ctrl-C; or the notice of preemption.py): nothing that it has in hand is lost.

    TERM -> Leaving: nothing new comes, the controller moves what is generated to other replicas, or has its
            KV cache parked at a relay; calls that are made for what has moved come to their end
         -> DRAIN_SECONDS later at most, or near the end that the notice named: what has not moved is broken
            off, its tokens so far go to the controller as Unfinished
         -> the last scores, for a moment -> Goodbye

Owned by worker.py. After a signal all of it takes less than `LEAVE_SECONDS` of launch/leaving.py, after which
the process ends by itself, and than the 30 s that Slurm leaves between TERM and KILL.
"""

import asyncio
import logging
from collections.abc import Callable

from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.rollouts import Leaving
from laminar_hpc.rollout.answers import CallAnswers
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.preemption import noticed

logger = logging.getLogger(__name__)
DRAIN_SECONDS = 7.0  # for responses to move away or to end
BREAK_SECONDS = 2.0  # for the engine to give back what it has
SETTLE_SECONDS = 1.5  # for scores that are under way
END_SECONDS = 3.0  # for the engine's end, the last words and the process's own end


class GracefulShutdown:
    """`leave(error)` ends the worker's turns, `wake()` has it look whether this has begun."""

    def __init__(
        self,
        batch: LocalBatch,
        leave: Callable[[BaseException], None],
        wake: Callable[[], None],
        answers: CallAnswers | None,
    ) -> None:
        self._context = batch.context
        self._batch = batch
        self._leave = leave
        self._wake = wake
        self._answers = answers
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """The replica was told to end."""
        return self._task is not None

    async def at_notice(self) -> None:
        """Begins when this machine is to be taken back, where cluster.preemption_notice says so."""
        if (where := self._context.config.cluster.preemption_notice) is None:
            return
        try:
            self.begin(await noticed(where))
        except Exception as error:  # else nobody would hear of it before the machine is gone
            self._leave(error)

    def begin(self, grace_seconds: float | None = None) -> None:
        """Called in the worker's loop; a second call does nothing. `grace_seconds`: until the machine goes,
        by a notice; None: after a signal."""
        if self._task is None:
            notice = "" if grace_seconds is None else f", with {grace_seconds:g} s left"
            logger.info("rollout %d was told to end%s", self._context.index, notice)
            self.say()
            for trajectory in self._batch.trajectories.values():  # its environment ends here
                trajectory.bound |= bool(trajectory.partial.home) and trajectory.session is not None
            self._task = asyncio.create_task(self._run(self._seconds(grace_seconds)))
            self._task.add_done_callback(self._done)
            self._wake()

    def say(self) -> None:
        """Tells a controller that does not know yet."""
        self._context.channel.send(Leaving())

    def _seconds(self, grace: float | None) -> float:
        """For what is generated to move away, or to end."""
        if grace is not None:
            return max(0.0, grace - BREAK_SECONDS - SETTLE_SECONDS - END_SECONDS)
        return min(DRAIN_SECONDS, self._context.config.cluster.stop_timeout_seconds)

    async def _run(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._settled(), seconds)
        except TimeoutError:
            left = await self._batch.break_off(BREAK_SECONDS)
            for trajectory in left:
                if not trajectory.evaluation:
                    self._context.channel.send(trajectory.unfinished())
            text = "%d responses had not moved away within %g s and are handed over as they are"
            logger.info(text, len(left), seconds)
        self._leave(StopReceived("it was told to end"))

    async def _settled(self) -> None:
        """Nothing is generated here any more, and no call made for what has moved."""
        await self._batch.over()
        if self._answers is not None:
            await self._answers.settled()

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._leave(error)
