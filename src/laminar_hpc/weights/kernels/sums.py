"""Checksums of tensors that add up over shards: made by the trainer, checked by relay and rollout
(docs/staleness.md).

Two 64-bit sums over the little-endian 32-bit words of a tensor's contiguous image, zero-padded to whole
words: the sum of the words, and the sum of (index + 1) * word, both modulo 2**64. The first sees every
changed bit, the second sees words that changed places; a shard that knows its place contributes its part
without a gather.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

extension: Any
try:
    extension = importlib.import_module("laminar_hpc._sums")  # csrc/sums.cpp
except ImportError:  # installed without a C++ compiler: numpy adds up, at a third of the speed
    extension = None

LazySums = Callable[[], list[tuple[int, int]]]  # gives both sums of each slice or span, perhaps after a wait
_ROW = 1 << 12  # words per row of the view that `buffer_sums` adds up: keeps the columns' sums in the cache
_MODULUS = 1 << 64


def tensor_sums(tensor: torch.Tensor, first_word: int = 0) -> tuple[int, int]:
    """Sums of one tensor (any shape and dtype, made contiguous on the host) whose first word has index
    `first_word` in the whole."""
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    rest = flat.numel() % 4
    if rest:
        flat = torch.cat([flat, torch.zeros(4 - rest, dtype=torch.uint8)])
    return buffer_sums(flat.numpy().view(np.uint32), first_word)


def buffer_sums(words: np.ndarray, first_word: int = 0) -> tuple[int, int]:
    """Sums of a one-dimensional uint32 array."""
    if extension is not None and words.flags.c_contiguous and len(words) and words.ctypes.data % 4 == 0:
        both = extension.move(0, 0, words.ctypes.data, 0, 1, len(words), 0, torch.get_num_threads())
        return shifted(both, first_word)
    whole = len(words) - len(words) % _ROW
    parts = [
        _grid_sums(words[:whole].reshape(-1, _ROW), first_word, _ROW),
        _grid_sums(words[None, whole:], first_word + whole, _ROW),
    ]
    return add_sums(parts)


def add_sums(parts: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Sums of a tensor from those of its shards, which cover it once."""
    chosen = list(parts)
    return sum(part[0] for part in chosen) % _MODULUS, sum(part[1] for part in chosen) % _MODULUS


def shifted(sums: Sequence[int], words: int) -> tuple[int, int]:
    """Sums of a part whose words all have an index greater by `words`."""
    return sums[0], (sums[1] + words * sums[0]) % _MODULUS


def slice_sums(part: torch.Tensor, shape: Sequence[int], dim: int, start: int) -> tuple[int, int]:
    """What a shard adds to the sums of the whole tensor of `shape`: elements [start, start + part.shape[dim])
    along `dim`.

    Items of 4 or 2 bytes. Two items share a word in the latter; where the shard begins or ends inside a word,
    its half is counted alone.
    """
    first_word, inside = divmod(start * math.prod(shape[dim + 1 :]) * part.element_size(), 4)
    if dim == 0 and not inside:
        return tensor_sums(part, first_word)
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    items = part.detach().to("cpu").contiguous().view(before, -1)  # one row per index before `dim`
    row_items, first = shape[dim] * after, start * after
    if items.element_size() == 4:
        return _grid_sums(items.view(torch.int32).numpy().view(np.uint32), first, row_items)
    values = items.view(torch.int16).numpy().view(np.uint16)
    if first % 2 == row_items % 2 == values.shape[1] % 2 == 0:
        return _grid_sums(values.view(np.uint32), first // 2, row_items // 2)
    return add_sums(_row_of_halves(row, first + number * row_items) for number, row in enumerate(values))


def _grid_sums(words: np.ndarray, first: int, stride: int) -> tuple[int, int]:
    """Sums of words [rows, columns] (uint32) of which [r, c] has index first + r * stride + c: from the rows'
    and the columns' sums."""
    rows, columns = words.sum(axis=1, dtype=np.uint64), words.sum(axis=0, dtype=np.uint64)
    begins = np.arange(len(rows), dtype=np.uint64) * np.uint64(stride) + np.uint64(first + 1)
    with np.errstate(over="ignore"):
        indexed = int((rows * begins).sum(dtype=np.uint64)) + int(
            (columns * np.arange(len(columns), dtype=np.uint64)).sum(dtype=np.uint64)
        )
    return int(rows.sum(dtype=np.uint64)), indexed % _MODULUS


def _row_of_halves(values: np.ndarray, first: int) -> tuple[int, int]:
    """Sums of 16-bit items in a row of which the first has item index `first`: padded with zeros to whole
    words."""
    padded = np.zeros(2 * ((first % 2 + len(values) + 1) // 2), dtype=np.uint16)
    padded[first % 2 : first % 2 + len(values)] = values
    return _grid_sums(padded.view(np.uint32)[None], first // 2, 1)
