"""torch's profile of some steps of a trainer rank, for observability.profile.

The steps follow the first one of this life, which warms up. Written when the last of them has ended, or the
run has: RUN_DIR/profile/trainerN.json.gz, for Perfetto or chrome://tracing, and trainerN.txt, the operations
that took most time. One rank of each pipeline stage does it: the others of its stage do the same work.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)
_ROWS = 40  # of the table


def speaks_for_its_stage() -> bool:
    """Whether this rank is the one of its pipeline stage that is profiled."""
    return bool(
        parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    )


class StepsProfile:
    """`steps` of them, after the step `first`; none with 0. One thread uses it."""

    def __init__(self, folder: Path, name: str, first: int, steps: int) -> None:
        self._folder = folder
        self._name = name
        self._steps = range(first + 1, first + 1 + steps)
        self._running: profile | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step of the trainer, waiting for its batch included."""
        if step not in self._steps:
            yield
            return
        if self._running is None:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._running.start()
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Writes what there is. A disk that does not take it costs the profile, not the run."""
        running = self._running
        self._running = None
        if running is None:
            return
        running.stop()
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self._folder / f"{self._name}.json.gz"))
            table = running.key_averages().table(sort_by=order, row_limit=_ROWS)
            (self._folder / f"{self._name}.txt").write_text(table)
        except (OSError, RuntimeError) as error:
            log.warning("the profile is not written: %s", error)
            return
        log.info("profile of steps %d to %d: %s", self._steps[0], self._steps[-1], self._folder)
