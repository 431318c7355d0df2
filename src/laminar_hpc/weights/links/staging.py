"""What the chunks of a link between devices pass through on their way from and to host memory.

    receiver    NCCL -> one of `devices` -> one of `hosts` -> its place in the slot
    sender      slot -> one of `hosts` -> one of `devices` -> NCCL

A device exchanges bytes with pinned memory only by itself, beside what the host does; slots are not pinned,
as each relay of a machine maps all of them. Used by weights/relay/chain.py.
"""

import torch

from laminar_hpc.weights.links.streams import Streams

RECEIVING = 3  # chunks in the device: two may arrive while an earlier one is looked at
SENDING = 2  # one leaves while the next one comes
HOSTS = 2  # one is copied by the device, one by the host


class Staging:
    """`devices` chunks in device memory and HOSTS in pinned memory, of `size` bytes each, used in turn."""

    def __init__(self, streams: Streams, size: int, devices: int) -> None:
        self.size = size
        self._devices = [streams.empty(size) for _ in range(devices)]
        self._hosts = [streams.pinned(size) for _ in range(HOSTS)]

    def device(self, number: int, size: int) -> torch.Tensor:
        """Device memory for chunk `number`."""
        return self._devices[number % len(self._devices)][:size]

    def host(self, number: int, size: int) -> torch.Tensor:
        """Pinned memory for chunk `number`."""
        return self._hosts[number % HOSTS][:size]
