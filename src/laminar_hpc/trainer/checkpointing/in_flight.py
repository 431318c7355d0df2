"""One checkpoint on its way to the disk, written by a thread beside the training. Used by
trainer/checkpoint.py on every rank.

    every rank   write its part, sync it ----> Reports
    rank 0       all parts there ------------> complete: metadata, list, fence, name

Whatever goes wrong is raised in the trainer's thread, by `poll` or `wait`; rank 0, which may wait for a batch
meanwhile, also tells `failed` at once. What is given up stays without a name, and the next checkpoint clears
it away.
"""

import threading
from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.checkpointing.reports import CheckpointPart, Reports

# this rank is waited for so much longer, so that rank 0's error is the one that is seen
_MARGIN_SECONDS = 60.0


class _CheckpointGivenUp(Exception): ...


class InFlight:
    """`write(check)` gives this rank's part, calling `check` on the way; `complete(parts)` is rank 0's, None
    on others. `seconds` bounds each wait."""

    def __init__(
        self,
        what: str,
        reports: Reports,
        rank: int,
        write: Callable[[Callable[[], None]], CheckpointPart],
        complete: Callable[[list[CheckpointPart]], None] | None,
        seconds: float,
        failed: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._what = what
        self._reports = reports
        self._rank = rank
        self._seconds = seconds
        self._write = write
        self._complete = complete
        self._failed = failed
        self._is_awaited = False
        self._given_up = threading.Event()
        self._error = list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self, in_foreground: bool) -> None:
        """Returns at once, or `in_foreground` when this rank's part is written and rank 0 is through."""
        self._is_awaited = in_foreground
        self._thread.start()
        if in_foreground:
            self.wait()

    def poll(self) -> None:
        """Raises what went wrong so far."""
        if self._error:
            raise self._error[0]

    def wait(self) -> None:
        """Returns when this rank's part is on the disk, on rank 0 when the checkpoint has its name. Raises
        what went wrong, LaminarError when it takes too long."""
        # rank 0 waits as long for the others when its own part is written, and says for whom
        limit = 2 * self._seconds + _MARGIN_SECONDS
        self._is_awaited = True
        self._thread.join(limit)
        self.poll()
        if self._thread.is_alive():
            raise LaminarError(
                f"trainer {self._rank} waited {limit:.0f} s for its part of {self._what} to be "
                "on the disk; look at the file system of run_dir"
            )

    def give_up(self, seconds: float) -> None:
        """Lets it end for so long, then leaves it without a name."""
        self._thread.join(seconds)
        self._given_up.set()
        self._thread.join(seconds)

    def _check(self) -> None:
        if self._given_up.is_set():
            raise _CheckpointGivenUp

    def _pause(self, seconds: float) -> None:
        self._given_up.wait(seconds)
        self._check()

    def _run(self) -> None:
        try:
            part = self._write(self._check)
            self._reports.tell(self._rank, part)
            if self._complete is not None:
                parts = self._reports.gather(self._pause, self._seconds)
                self._check()
                self._complete(parts)
        except _CheckpointGivenUp:
            pass
        except BaseException as error:
            self._error.append(error)
            if self._rank > 0:
                self._reports.tell(self._rank, CheckpointPart(wrong=f"{type(error).__name__}: {error}"))
            elif not self._is_awaited:
                self._failed(error)
