"""Megatron's torch_dist format, written by a thread of this process while training goes on. Used by
trainer/checkpoint.py on every rank.

Megatron's fully parallel strategy says which rank writes what: of what several data-parallel ranks have, each
writes a part. Megatron's own asynchronous writer (megatron/core/dist_checkpointing/strategies/
filesystem_async.py of 0.16.1, `write_preloaded_data_multiproc`) starts a manager and forks: in a process with
threads of its own that can hang, and its wait for a fork that has died is unbounded. Its finalizer is a
collective of the whole world; here each rank says what it has written, and rank 0 completes the checkpoint.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from laminar_hpc.machine.files.durable import FileSum, SealedFile
from laminar_hpc.trainer.checkpointing.copies import HostCopies, Wanted


class Written(msgspec.Struct, array_like=True):
    """Where a box of a tensor lies: bytes [begin, begin + length) of `file`."""

    tensor: str
    offset: list[int] | None
    index: int | None
    file: str
    begin: int
    length: int


class Shards(FileSystemWriterAsync):
    """What this rank writes of one checkpoint."""

    metadata: Any = None  # of the whole checkpoint, on rank 0

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called by Megatron's planning; takes the live tensors as they are."""
        self._name = f"{plan.storage_data.prefix}0.distcp"
        self._items: list[tuple[WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]

    @property
    def wanted(self) -> list[Wanted]:
        """For copies of the tensors that this rank writes."""
        return [
            _copy_of(n, data) for n, (_, data) in enumerate(self._items) if isinstance(data, torch.Tensor)
        ]

    def copy_to(self, copies: HostCopies) -> None:
        """From here on training may change the tensors, once the device has been synchronized."""
        self._items = [
            (item, copies.copy(_copy_of(n, data), data) if isinstance(data, torch.Tensor) else data)
            for n, (item, data) in enumerate(self._items)
        ]

    def write(self, check: Callable[[], None]) -> tuple[dict[str, FileSum], list[Written]]:
        """Writes the copies, or the live tensors one by one; returns when all of it is on the disk. `check`
        as SealedFile has it. Raises OSError."""
        if not self._items:
            return {}, []
        folder, written = Path(self.checkpoint_dir), list[Written]()
        with SealedFile(folder / self._name, check) as file:
            for item, data in self._items:
                if isinstance(data, torch.Tensor):
                    data = _with_storage_of_its_own(data.detach().cpu())
                done = _write_item(
                    self.transforms, file, data, item, self._name, SerializationFormat.TORCH_SAVE
                )
                place, index = done.storage_data, done.index
                offset = None if index.offset is None else list(index.offset)
                written.append(
                    Written(index.fqn, offset, index.index, self._name, place.offset, place.length)
                )
            return {self._name: file.seal()}, written

    def complete(self, written: list[list[Written]]) -> None:
        """On rank 0, when the parts of all ranks are on the disk: writes the metadata."""
        results = [[_result(each) for each in part] for part in written]
        self.finish(self.metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.checkpoint_dir))


def _copy_of(number: int, tensor: torch.Tensor) -> Wanted:
    return Wanted(f"shard {number}", tuple(tensor.shape), tensor.dtype)


def _with_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """torch.save writes the storage behind a view, all of it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _result(written: Written) -> WriteResult:
    offset = None if written.offset is None else torch.Size(written.offset)
    place = _StorageInfo(written.file, written.begin, written.length)
    return WriteResult(MetadataIndex(written.tensor, offset, written.index), written.length, place)


class ShardWriter:
    """Plans what each rank writes: anew when the state has another structure than the one before, else as it
    was. `agree` gives whether any rank says so."""

    def __init__(self, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self._structure = list[tuple]()
        self._planner = _Planner("torch_dist", 1)
        self._strategy = self._fully_parallel()

    def plan(self, state: dict, folder: Path) -> Shards:
        """Collective. `folder` is there and empty."""
        structure = list(_structure(state))
        changed = self._agree(structure != self._structure)
        if changed:
            self._planner = _Planner("torch_dist", 1)
            self._strategy = self._fully_parallel()
            self._structure = structure
        dist_checkpointing.save(
            state, str(folder), self._strategy, validate_access_integrity=changed, async_sharded_save=True
        )
        return self._planner.shards

    def _fully_parallel(self) -> FullyParallelSaveStrategyWrapper:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return FullyParallelSaveStrategyWrapper(self._planner, replicas, do_cache_distribution=True)


def _structure(state: dict) -> Iterator[tuple]:
    for each in nested_values(state):
        if isinstance(each, ShardedBase) and isinstance(each.data, torch.Tensor):
            yield each.key, getattr(each, "global_offset", None), tuple(each.data.shape), each.data.dtype


class _Planner(torch_dist.TorchDistSaveShardedStrategy):
    """Megatron's plan for each rank, kept for the next checkpoint; nothing is written."""

    shards: Shards
    _kept: tuple[SavePlan, SavePlan, Any] | None = None

    def async_save(self, sharded_state_dict: dict, checkpoint_dir: Path) -> AsyncRequest:
        named, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        self.shards = Shards(checkpoint_dir, thread_count=1)
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, metadata, _), central, local, _, _ = save_state_dict_async_plan(
            torch_dist.mcore_to_pyt_state_dict(named, False),
            self.shards,
            planner=planner,
            cached_ckpt_structure=self._kept and (*self._kept[:2], True),
        )
        self._kept = self._kept or (central, local, metadata)
        self.shards.metadata = self._kept[2]
        return AsyncRequest(None, (), [])
