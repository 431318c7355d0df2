"""hf/ of a checkpoint, a Hugging Face directory: every rank writes its files of it, and nothing is gathered
on one of them. Used by trainer/checkpoint.py.

Not written by a relay from its slot, though a slot is such a directory: a relay may be gone or behind, and a
replay has none, so a checkpoint would need a second way; and it would have to hold the slot for the disk's
time. The weights lie nowhere else in a checkpoint, so that each byte is written once.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.machine.files import durable
from laminar_hpc.machine.files.durable import FileSum, SealedFile
from laminar_hpc.trainer.canonical.exchange import bounded
from laminar_hpc.trainer.canonical.files import plan_files
from laminar_hpc.trainer.canonical.plan import HeldSlice
from laminar_hpc.trainer.checkpointing.copies import HostCopies, Wanted
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.weights.experts import is_expert
from laminar_hpc.weights.hf import copy_side_files, safetensors_parts, write_index
from laminar_hpc.weights.kernels.slices import LocalSlice, SliceKey, by_key

Collected = list[tuple[str, list[tuple[str, torch.Tensor]]]]  # files of this rank, with their tensors


def write_tensors(folder: Path, files: Collected, check: Callable[[], None]) -> dict[str, FileSum]:
    """As safetensors files; returns when all of it is on the disk. Raises OSError."""
    sums: dict[str, FileSum] = {}
    for name, tensors in files:
        with SealedFile(folder / name, check) as file:
            for part in safetensors_parts(tensors):
                file.write(part)
            sums[name] = file.seal()
    return sums


class HfFiles:
    """Of one policy. `seconds` bounds each wait for another rank."""

    def __init__(self, policy: MegatronPolicy, seconds: float) -> None:
        self._policy = policy
        self._seconds = seconds
        self._rank = dist.get_rank()
        group = parallel_state.get_tensor_model_parallel_group()
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._slices = policy.canonical_slices
        self._dtype = policy.dtype
        size, stage_ranks = self._dtype.itemsize, dist.get_world_size() // stages
        self._expert_parallel = parallel_state.get_expert_model_parallel_world_size()
        self._files = plan_files(self._slices, size, stage_ranks, len(self._ranks), self._expert_parallel)
        mine = [name for file in self._files if file.writer == self._rank for name in file.tensors]
        self.wanted = [self._copy_of(name) for name in mine]  # for copies of what this rank writes

    def collect(self, copies: HostCopies | None) -> Collected:
        """The tensors of this rank's files, whole and in host memory: in `copies`, or without them views of
        the live parameters where one rank holds all. Collective over the tensor-parallel groups."""
        own = by_key(self._policy.slices)
        collected: Collected = []
        with torch.no_grad():
            for file in self._files:
                if file.writer in self._ranks:
                    tensors = [(name, self._collect(name, file.writer, own, copies)) for name in file.tensors]
                    if file.writer == self._rank:
                        collected.append((file.name, [(name, t) for name, t in tensors if t is not None]))
        return collected

    def _collect(
        self, name: str, writer: int, own: dict[SliceKey, LocalSlice], copies: HostCopies | None
    ) -> torch.Tensor | None:
        slices, whole = self._slices[name], None
        if writer == self._rank:
            if copies is None and len(slices) == 1 and self._holder(slices[0], writer) == writer:
                return own[slices[0].key].value().to(self._dtype).contiguous().cpu()
            here = self._copy_of(name)
            whole = torch.empty(here.shape, dtype=here.dtype) if copies is None else copies.buffer(here)
        for s in slices:
            values, holder = None, self._holder(s, writer)
            if holder == self._rank:
                values = own[s.key].value().to(self._dtype)
            if holder != writer:
                values = self._pass_on(name, s, values, holder, writer)
            if whole is not None and values is not None:
                whole.narrow(s.dim, s.start, s.length).copy_(values, non_blocking=True)
        return whole

    def _copy_of(self, name: str) -> Wanted:
        return Wanted(name, self._slices[name][0].shape, self._dtype)

    def _holder(self, s: HeldSlice, writer: int) -> int:
        """The rank of this tensor-parallel group that holds what `s.rank` of the first replica does; of an
        expert that is nowhere split its writer is one."""
        if self._expert_parallel > 1 and is_expert(s.name):
            return writer
        return self._ranks[s.rank % len(self._ranks)]

    def _pass_on(
        self, name: str, s: HeldSlice, values: torch.Tensor | None, holder: int, writer: int
    ) -> torch.Tensor | None:
        """From the holder, which has `values`, to the writer; other ranks of the group do nothing."""
        if values is not None:
            tensor = values.contiguous()
            bounded(lambda: dist.send(tensor, writer, group=self._group), writer, name, self._seconds)
            return None
        if writer != self._rank:
            return None
        received = torch.empty(s.slice_shape, dtype=self._dtype, device=self._policy.device)
        bounded(lambda: dist.recv(received, holder, group=self._group), holder, name, self._seconds)
        return received

    def write(self, folder: Path, files: Collected, check: Callable[[], None]) -> dict[str, FileSum]:
        """What `collect` gave, into `folder`, which is there; returns when all of it is on the disk. Rank 0
        adds what is not a tensor. Raises OSError."""
        sums = write_tensors(folder, files, check)
        if self._rank == 0:
            copy_side_files(self._policy.config.model.path, folder, self._dtype)
            if len(self._files) > 1:
                write_index(
                    folder, {name: file.name for file in self._files for name in file.tensors}, self._total()
                )
            beside = {path for path in folder.iterdir() if path.suffix != ".safetensors"}
            sums |= {path.name: durable.seal(path) for path in beside}
        return sums

    def _total(self) -> int:
        return sum(self._dtype.itemsize * math.prod(held[0].shape) for held in self._slices.values())
