"""How an engine takes weights: each tensor-parallel rank copies its slices from the slot in shared memory
into its live parameters.

Called by port.py in the scheduler's thread, with no request running. Everything is checked before the first
byte is written; what fails after it leaves parameters of two ids, and the caller ends the engine. A slot's
file is mapped once and stays mapped: a relay rewrites its slots in place. On a GPU the mapping is registered
with CUDA, so that the copies run by DMA, one behind the other.
"""

import logging
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.sglang.plugin.live_weights import View
from laminar_hpc.kernels import pack
from laminar_hpc.kernels.slices import LocalSlice
from laminar_hpc.weights.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    decode_manifest,
    safetensors_header,
)

logger = logging.getLogger(__name__)
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: the mapping cannot be written through
# file -> (device, inode, size), its bytes
_mapped: dict[Path, tuple[tuple[int, int, int], torch.Tensor]] = {}


def map_file(path: Path, pinned: bool) -> torch.Tensor:
    """The file's bytes (uint8), read-only, mapped at the first call; `pinned`: registered with CUDA where the
    driver allows it."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino, status.st_size)
        if path in _mapped and _mapped[path][0] == identity:
            return _mapped[path][1]
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(memory, dtype=np.uint8)
    old = _mapped.pop(path, None)
    if pinned:
        cudart = torch.cuda.cudart()
        if old is not None:  # of a relay that has gone
            cudart.cudaHostUnregister(old[1].data_ptr())
        if int(cudart.cudaHostRegister(array.ctypes.data, len(array), _READ_ONLY)):
            logger.warning("CUDA does not register %s: weights are loaded through pageable memory", path)
    _mapped[path] = (identity, _tensor(array))
    return _mapped[path][1]


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Shares the memory. torch warns of read-only arrays, and nothing here writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def sources(views: Sequence[View], data: torch.Tensor, manifest: Manifest) -> list[torch.Tensor]:
    """Of each view, its slice of the file's bytes. Raises LaminarError unless the views hold exactly the
    manifest's tensors, as it says."""
    header = safetensors_header(manifest)
    if data.numel() != len(header) + manifest.data_bytes or data[: len(header)].numpy().tobytes() != header:
        raise LaminarError(f"the file of weight id {manifest.weight_id} is not laid out as its manifest says")
    entries = {entry.name: entry for entry in manifest.tensors}
    names = {view.name for view in views}
    if names != entries.keys():
        raise LaminarError(
            f"weight id {manifest.weight_id} and the engine differ in {sorted(names ^ entries.keys())[:3]}"
        )
    slices = []
    for view in views:
        entry = entries[view.name]
        if (tuple(entry.shape), entry.dtype) != (
            tuple(view.shape),
            str(view.tensor.dtype).removeprefix("torch."),
        ):
            raise LaminarError(
                f"tensor {view.name} is {entry.shape} {entry.dtype} in "
                f"weight id {manifest.weight_id} and {view.shape} here"
            )
        begin = len(header) + entry.offset
        whole = data[begin : begin + entry.nbytes].view(view.tensor.dtype).view(tuple(entry.shape))
        slices.append(whole.narrow(view.dim, view.start, view.tensor.shape[view.dim]))
    return slices


def load_slot(views: Sequence[View], directory: Path) -> dict[str, tuple[int, int]]:
    """The slot's weights into the live parameters. Returns what they then add to the sums of the whole
    tensors, as live_weights.live_sums does: taken from the parameters, after the copy. Raises LaminarError,
    with nothing written, when the slot does not fit the engine."""
    on_gpu = any(view.tensor.is_cuda for view in views)
    manifest = decode_manifest((directory / MANIFEST_FILE).read_bytes())
    origins = sources(views, map_file(directory / WEIGHTS_FILE, on_gpu), manifest)
    if on_gpu:
        for view, source in zip(views, origins, strict=True):
            view.tensor.copy_(source, non_blocking=True)
        origins = [view.tensor for view in views]
    slices = [
        LocalSlice(v.name, tuple(v.shape), v.dim, v.start, v.tensor.shape[v.dim], s)
        for v, s in zip(views, origins, strict=True)
    ]
    # on a GPU onto themselves: one pass over the parameters
    sums = pack(slices, [view.tensor for view in views])()
    return {view.name: both for view, both in zip(views, sums, strict=True)}
