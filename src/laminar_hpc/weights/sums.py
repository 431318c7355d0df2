"""Checksums of tensors that add up over shards: made by the trainer, checked by relay and rollout (ARCHITECTURE 4).

Two 64-bit sums over the little-endian 32-bit words of a tensor's contiguous image, zero-padded to whole words: the sum of the words, and
the sum of (index + 1) * word, both modulo 2**64. The first sees every changed bit, the second sees words that changed places; a shard that
knows its first index contributes its part without a gather.
"""

import numpy as np
import torch

_BLOCK = 1 << 20  # words per block: bounds the temporary of the indexed product


def tensor_sums(tensor: torch.Tensor, first_word: int = 0) -> tuple[int, int]:
    """Sums of one tensor (any shape and dtype, made contiguous on the host) whose first word has index `first_word` in the whole."""
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    rest = flat.numel() % 4
    if rest:
        flat = torch.cat([flat, torch.zeros(4 - rest, dtype=torch.uint8)])
    return buffer_sums(flat.numpy().view(np.uint32), first_word)


def buffer_sums(words: np.ndarray, first_word: int = 0) -> tuple[int, int]:
    """Sums of a one-dimensional uint32 array."""
    total = indexed = 0
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK].astype(np.uint64)
        index = np.arange(first_word + start + 1, first_word + start + 1 + len(block), dtype=np.uint64)
        total += int(block.sum(dtype=np.uint64))
        with np.errstate(over="ignore"):
            indexed += int((block * index).sum(dtype=np.uint64))
    return total % 2**64, indexed % 2**64
