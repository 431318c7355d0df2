"""How a rank leaves the run before its end: at a signal, or because other trainers have taken its place."""

import contextlib
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time

from laminar_hpc.line.agent_line import FAILED_ELSEWHERE
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.endings import Terminated, TrainersReplaced

LEAVE_SECONDS = 17.0  # a rank that was told to end is gone after this, whatever it waits for
LEAVES = ("relay", "rollout")  # roles without which the run goes on; one world ends as a whole
DRAIN_SECONDS = 14.0  # of these, how long a rollout without a controller waits for one that takes what it has
ONE_SIGNAL_SECONDS = 3.0  # Slurm, torchrun and the launch script may all pass on the same signal


def watch_signals(role: str) -> list[Channel]:
    """TERM and INT: the controller ends the run in order, or a role of LEAVES leaves it, which meets
    Terminated; if that takes too long, or at a second signal, this process ends by itself. Its exit code is 0
    if it had said all and only its own end took too long.

    A thread reads the interpreter's wake-up pipe, because a Python handler would not run while the main
    thread waits in a collective. The caller puts its channel into the returned list when it has joined the
    run; before that there is nothing to end in order.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    joined: list[Channel] = []
    leaves, drains = role in LEAVES, role == "rollout"

    def leave() -> None:
        os.read(read_end, 1)
        if leaves and not joined:
            os._exit(0)  # nothing has begun
        for channel in joined:
            channel.end_within(DRAIN_SECONDS if drains else 0.0, drains)
            if leaves:
                channel.interrupt(Terminated())
            time.sleep(ONE_SIGNAL_SECONDS)
            os.set_blocking(read_end, False)
            with contextlib.suppress(BlockingIOError):
                os.read(read_end, 4096)
            again, _, _ = select.select([read_end], [], [], LEAVE_SECONDS - ONE_SIGNAL_SECONDS)
            if not again:
                print(
                    f"not gone {LEAVE_SECONDS:g} s after it was told to end; it stands at:", file=sys.stderr
                )
                faulthandler.dump_traceback(all_threads=True)
                os._exit(0 if channel.has_said_all else 1)
        os._exit(1)

    threading.Thread(target=leave, name="signals", daemon=True).start()
    return joined


def leave_at_once(replaced: TrainersReplaced) -> None:
    """Called by the channel's thread: whatever the main thread waits for, nothing it does counts any more."""
    logging.getLogger(__name__).error("leaving: %s", replaced)
    logging.shutdown()
    os._exit(FAILED_ELSEWHERE)
