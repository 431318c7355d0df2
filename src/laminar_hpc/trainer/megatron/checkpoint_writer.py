"""Megatron's torch_dist format, written by this process. Called by trainer/checkpoint.py.

Megatron's own writer (megatron/core/dist_checkpointing/strategies/filesystem_async.py of 0.16.1,
`write_preloaded_data_multiproc`) starts a manager and forks: in a process with threads of its own that can
hang, and its wait for a fork that has died is unbounded.
"""

import functools
import queue
from pathlib import Path

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


def in_process_strategy() -> TorchDistSaveShardedStrategy:
    """What `dist_checkpointing.save` is to write with."""
    return _InProcess("torch_dist", 1, thread_count=1)


class _InProcess(TorchDistSaveShardedStrategy):
    def async_save(self, sharded_state_dict: dict, checkpoint_dir: Path) -> AsyncRequest:
        filesystem_async._results_queue = queue.Queue()  # else a manager process is started to hold it
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(
        self, writer: filesystem_async.FileSystemWriterAsync, plan: tuple
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, plan)
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        return (
            request
            if request.async_fn is None
            else request._replace(async_fn=functools.partial(_write_here, transforms))
        )


def _write_here(transforms: list, rank: int, buckets: list, results: queue.Queue) -> None:
    """What Megatron's forked writers do, one after the other; an error is handed on as Megatron expects it,
    and raised by its finalizer."""
    written: dict | Exception = {}
    for i, bucket in enumerate(buckets):
        outcome, running = queue.Queue(), queue.Queue()
        running.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, outcome, running, use_fsync=True
        )
        _, result = outcome.get_nowait()
        if isinstance(result, Exception):
            written = result
            break
        written[i] = result
    results.put(written)
