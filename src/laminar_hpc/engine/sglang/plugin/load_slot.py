"""How an engine takes weights: each tensor-parallel rank copies its slices from the slot in shared memory
into its live parameters.

Called by port.py in the scheduler's thread, with no request running. Everything is checked before the first
byte is written; what fails after it leaves parameters of two ids, and the caller ends the engine. A slot's
file is mapped once and stays mapped: a relay rewrites its slots in place. On a GPU the mapping is registered
with CUDA, so that the copies run by DMA, one behind the other.
"""

import contextlib
import logging
import mmap
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.kernels import pack
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.manifest import MANIFEST_FILE, Manifest, decode_manifest, safetensors_header

logger = logging.getLogger(__name__)
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: the mapping cannot be written through
_DEFAULT = 0x00  # cudaHostRegisterDefault
# file -> (device, inode, size), its bytes
_mapped: dict[Path, tuple[tuple[int, int, int], torch.Tensor]] = {}


def map_file(path: Path, pinned: bool) -> torch.Tensor:
    """The file's bytes (uint8), which nobody here writes, mapped at the first call; `pinned`: registered with
    CUDA where the system allows it."""
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_size)
    if path in _mapped and _mapped[path][0] == identity:
        return _mapped[path][1]
    old = _mapped.pop(path, None)
    if pinned and old is not None:  # of a relay that has gone
        _unregister(old[1])
    _mapped[path] = (identity, _registered(path) if pinned else _map(path))
    return _mapped[path][1]


def _map(path: Path, writable: bool = False) -> torch.Tensor:
    with open(path, "r+b" if writable else "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return _tensor(np.frombuffer(memory, dtype=np.uint8))


def _registered(path: Path) -> torch.Tensor:
    """The mapped file, registered with CUDA: read-only, or, where the system has no such registration, in a
    mapping that could be written; else not registered."""
    cudart = torch.cuda.cudart()
    for writable, flags in ((False, _READ_ONLY), (True, _DEFAULT)):
        try:
            data = _map(path, writable)
        except PermissionError:  # another user's slots
            break
        if not int(cudart.cudaHostRegister(data.data_ptr(), data.numel(), flags)):
            return data
        _clear_error()
    logger.warning("CUDA does not register %s: weights are loaded through pageable memory", path)
    return _map(path)


def _unregister(data: torch.Tensor) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(data.data_ptr())):  # it never was
        _clear_error()


def _clear_error() -> None:
    """CUDA keeps the error of a refused registration for whoever launches next: this launch takes it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Shares the memory. torch warns of read-only arrays, and nothing here writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def sources(held: Sequence[LocalSlice], data: torch.Tensor, manifest: Manifest) -> list[torch.Tensor]:
    """Of each slice, its part of the file's bytes. Raises LaminarError unless the slices are of exactly the
    manifest's tensors, as it says."""
    header = safetensors_header(manifest)
    if data.numel() != len(header) + manifest.data_bytes or data[: len(header)].numpy().tobytes() != header:
        raise LaminarError(f"the file of weight id {manifest.weight_id} is not laid out as its manifest says")
    entries = {entry.name: entry for entry in manifest.tensors}
    names = {mine.name for mine in held}
    if names != entries.keys():
        raise LaminarError(
            f"weight id {manifest.weight_id} and the engine differ in {sorted(names ^ entries.keys())[:3]}"
        )
    parts = []
    for mine in held:
        entry, dtype = entries[mine.name], mine.view.dtype
        if (tuple(entry.shape), entry.dtype) != (tuple(mine.shape), str(dtype).removeprefix("torch.")):
            raise LaminarError(
                f"tensor {mine.name} is {entry.shape} {entry.dtype} in "
                f"weight id {manifest.weight_id} and {mine.shape} here"
            )
        begin = len(header) + entry.offset
        whole = data[begin : begin + entry.nbytes].view(dtype).view(tuple(entry.shape))
        parts.append(whole.narrow(mine.dim, mine.start, mine.length))
    return parts


def load_slot(held: Sequence[LocalSlice], directory: Path) -> dict[str, tuple[int, int]]:
    """The slot's weights into the live parameters, of which `held` has views. Returns what they then add to
    the sums of the whole tensors, as live_weights.live_sums does: taken from the parameters, after the copy.
    Raises LaminarError, with nothing written, when the slot does not fit the engine."""
    on_gpu = any(mine.view.is_cuda for mine in held)
    manifest = decode_manifest((directory / MANIFEST_FILE).read_bytes())
    parts = sources(held, map_file(directory / manifest.file, on_gpu), manifest)
    if on_gpu:
        for mine, part in zip(held, parts, strict=True):
            mine.view.copy_(part, non_blocking=True)
        parts = [mine.view for mine in held]
    slices = [replace(mine, view=part) for mine, part in zip(held, parts, strict=True)]
    # on a GPU onto themselves: one pass over the parameters
    sums = pack(slices, [mine.view for mine in held])()
    return {mine.name: both for mine, both in zip(held, sums, strict=True)}
