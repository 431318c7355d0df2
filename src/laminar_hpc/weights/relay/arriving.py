"""The sums of a publication that arrives, taken while later bytes are on their way. Used by chain.py."""

import torch

from laminar_hpc.weights.kernels.host import move
from laminar_hpc.weights.kernels.sums import add_sums, shifted, tensor_sums
from laminar_hpc.weights.manifest import Manifest


class ArrivingSums:
    """Sums of tensors that arrive in order: each byte is looked at once, while later ones are on their
    way."""

    def __init__(self, manifest: Manifest, data: torch.Tensor) -> None:
        self._manifest = manifest
        self._data = data
        self._number = self._done = 0  # tensor; bytes of it that are in its sums
        self._parts: list[tuple[int, int]] = []
        self.sums: list[tuple[int, int]] = []  # of the tensors that are complete

    def grown(self, there: int) -> None:
        """The first `there` bytes are valid now."""
        while self._number < len(self._manifest.tensors):
            entry = self._manifest.tensors[self._number]
            ready = min(there - entry.offset, entry.nbytes)
            whole = ready if ready == entry.nbytes else ready - ready % 4  # sums are over 32-bit words
            if whole > self._done:
                part = self._data[entry.offset + self._done : entry.offset + whole]
                self._add(tensor_sums(part, self._done // 4), whole)
            if ready < entry.nbytes:
                return
            self._end()

    def put(self, first: int, chunk: torch.Tensor) -> None:
        """Copies what has come elsewhere to its place, byte `first`, and adds it up on the way, tensor by
        tensor; what `move` cannot do is only copied, for `grown` to add up."""
        end = first + chunk.numel()
        for number in range(self._number, len(self._manifest.tensors)):
            entry = self._manifest.tensors[number]
            if entry.offset >= end:
                return
            begin, stop = max(first, entry.offset), min(end, entry.offset + entry.nbytes)
            if begin >= stop:
                continue
            target, source = self._data[begin:stop], chunk[begin - first : stop - first]
            in_order = number == self._number and begin == entry.offset + self._done
            both = move(target, source) if in_order else None
            if both is None:
                target.copy_(source)
                continue
            self._add(shifted(both, self._done // 4), stop - entry.offset)
            if self._done == entry.nbytes:
                self._end()

    def _add(self, both: tuple[int, int], done: int) -> None:
        self._parts.append(both)
        self._done = done

    def _end(self) -> None:
        self.sums.append(add_sums(self._parts))
        self._number += 1
        self._done = 0
        self._parts = []
