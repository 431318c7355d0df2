"""What a run measured: run_dir/metrics.jsonl, one JSON object per line, mirrored to TensorBoard under
run_dir/tensorboard, and by a flag to Weights & Biases.

Only the controller writes, through one `MetricsWriter`. Each line carries "kind" and "time" (seconds since
the Unix epoch); the kinds and their fields are in docs/metrics.md. A line is in the file when `write`
returns, or, on a disk that takes nothing, when a later one is; a restart appends. Imports no torch.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from laminar_hpc.machine.compat.optional import left_out
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.console import line

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

    from laminar_hpc.machine.observability.wandb_mirror import WandbMirror

# Fields that say which one was measured rather than what: they become part of the TensorBoard tag.
LABELS = {
    "evaluation": ("file", "name"),
    "pull": ("replica",),
    "relay": ("index",),
    "logprob_mismatch": ("replica",),
}
NOT_CURVES = frozenset(
    "start end restart reward_error refused given_up lost regranted reattached controller_back "
    "scored_elsewhere leaving engine_hung move move_off repack scaling scaled scale_failed".split()
)
TENSORBOARD_FLUSH_SECONDS = 5
_LINES = 100_000  # that wait for a disk which takes none
_QUEUE = 1_000_000  # points: a full queue of which the reader has died would block us for good


class MetricsWriter:
    """Appends to the metrics of one run. Used by one thread. `assure` raises an error where another process
    writes them by now; `say` prints a line for the user."""

    def __init__(
        self,
        run_dir: Path,
        mirror: "WandbMirror | None" = None,
        assure: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._mirror = mirror
        self._assure = assure
        self._say = say
        self._path = self._run_dir / "metrics.jsonl"
        self._file = jsonl.Appender(
            self._path, lambda: self._warn("was removed: it is made again, with all its lines"), seals=True
        )
        self._waiting: deque[dict] = deque(maxlen=_LINES)
        self._board: SummaryWriter | None = None
        self._newest_step = 0  # of the curves

    def write(self, kind: str, **fields: object) -> dict:
        """Appends one line of `kind`, and its numbers as curves over "step" where the line has one. Gives the
        line back.

        `start` and `restored` with a restored_step hide the curves beyond that step, as those steps are done
        again.
        """
        record = {"kind": kind, "time": time.time(), **fields}
        self._assure()
        self._waiting.append(record)
        self._write()
        if kind == "start":
            self._open_board(fields.get("restored_step"))
        elif kind == "restored":
            back_to = cast(int, fields["restored_step"] or 0)
            if back_to < self._newest_step:
                self._open_board(back_to)
        elif kind not in NOT_CURVES and isinstance(step := fields.get("step"), int):
            board = self._board or self._open_board(None)
            self._newest_step = max(self._newest_step, step)
            points = list(curves(record))
            # on a full disk the thread behind it dies; what is in its queue then is lost
            if board.file_writer.event_writer._worker.is_alive():
                for tag, value in points:
                    board.add_scalar(tag, value, global_step=step, walltime=record["time"])
            if self._mirror is not None:
                self._mirror.log(points, step)
        elif kind == "end" and self._mirror is not None:
            self._mirror.close(failed=str(fields.get("reason", "")).startswith("failed"))
        return record

    def _warn(self, text: str) -> None:
        self._say(line("warning", f"{self._path} {text}"))

    def _write(self) -> None:
        """Writes the waiting lines as far as the disk takes them: no run ends because of a figure."""
        try:
            while self._waiting:
                self._file.write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if len(self._waiting) == 1:
                self._warn(f"cannot be written ({error.strerror}): its lines wait until it can")

    def close(self) -> None:
        self._write()
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._mirror is not None:
            self._mirror.close()

    def _open_board(self, restored_step: object) -> "SummaryWriter":
        if self._board is not None:
            self._board.close()
        purge = restored_step + 1 if isinstance(restored_step, int) else None
        self._newest_step = restored_step if isinstance(restored_step, int) else 0
        with left_out("torch"):  # tensorboardX would import it for tensors: seconds, and memory
            from tensorboardX import SummaryWriter
        self._board = SummaryWriter(
            str(self._run_dir / "tensorboard"),
            purge_step=purge,
            flush_secs=TENSORBOARD_FLUSH_SECONDS,
            max_queue=_QUEUE,
            filename_suffix=f".{os.getpid()}",
        )
        # nor is what nobody reads waited for at the end of the process
        self._board.file_writer.event_writer._event_queue.cancel_join_thread()
        return self._board


def curves(record: Mapping) -> Iterator[tuple[str, float]]:
    """(TensorBoard tag, value) of every number in `record`: evaluation/heldout/greedy/accuracy, ..."""
    labels = LABELS.get(record["kind"], ())
    prefix = "/".join([record["kind"], *(str(record.get(name, "")) for name in labels)])
    yield from _numbers(
        prefix, {k: v for k, v in record.items() if k not in ("kind", "time", "step", *labels)}
    )


def _numbers(prefix: str, values: Mapping) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", float(value)
