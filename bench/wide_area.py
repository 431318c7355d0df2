"""Two places on one machine: network namespaces behind a line of a given rate, round trip and loss. Linux,
root, iproute2, /dev/net/tun.

A process passes packets between two TUN devices, so it needs no netem in the kernel. TCP of the kernel meets
real losses and delays; what is above the rate queues for QUEUE_SECONDS, then is dropped.
"""

import collections
import contextlib
import fcntl
import multiprocessing
import os
import random
import select
import struct
import time
from multiprocessing.synchronize import Event

import network
from network import Network, enter, ip, remove_abandoned

from laminar_hpc.machine.processes import die_with_parent

QUEUE_SECONDS = 0.1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_MAX = 1 << 16
DEVICE = "wan0"


def missing() -> str:
    """Why there can be no such line here, or ""."""
    return network.missing() or ("" if os.path.exists("/dev/net/tun") else "/dev/net/tun is not there")


class _Direction:
    """Packets that are on their way from one device to the other, in order."""

    def __init__(self, source: int, sink: int, rate: float, delay: float, loss: float) -> None:
        self.source, self._sink = source, sink
        self._rate, self._delay, self._loss = rate, delay, loss
        self._free = 0.0  # when the last packet has left
        self._under_way = collections.deque[tuple[float, bytes]]()

    @property
    def due(self) -> float:
        """When the next packet arrives."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def take(self, now: float) -> None:
        packet = os.read(self.source, _PACKET_MAX)
        if random.random() < self._loss or self._free - now > QUEUE_SECONDS:
            return
        self._free = max(self._free, now) + len(packet) / self._rate
        self._under_way.append((self._free + self._delay, packet))

    def deliver(self, now: float) -> None:
        while self.due <= now:
            with contextlib.suppress(OSError):  # the device is down
                os.write(self._sink, self._under_way.popleft()[1])


def _device(namespace: str) -> int:
    enter(namespace)
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _line(namespaces: tuple[str, str], rate: float, delay: float, loss: float, ready: Event) -> None:
    die_with_parent()
    here, there = (_device(name) for name in namespaces)
    directions = [
        _Direction(source, sink, rate, delay, loss) for source, sink in ((here, there), (there, here))
    ]
    ready.set()
    while True:
        wait = min(each.due for each in directions) - time.monotonic()
        readable = select.select([here, there], [], [], min(1.0, max(0.0, wait)))[0]
        now = time.monotonic()
        for each in directions:
            if each.source in readable:
                each.take(now)
            each.deliver(now)


class WideArea(Network):
    """Places 0 and 1, each a host, and nothing between them but the line: `mbit` Mbit/s each way, a round
    trip of `milliseconds`, `loss` the share of packets that get lost, in either direction. `control`: TCP's
    congestion control there, which decides what a loss costs."""

    def __init__(self, mbit: float, milliseconds: float, loss: float, control: str = "cubic") -> None:
        remove_abandoned()
        self._made: list[str] = []
        self._control = control
        names = self._namespace(0), self._namespace(1)
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        shape = (mbit * 1e6 / 8, milliseconds / 2000, loss)
        self._process = context.Process(target=_line, args=(names, *shape, ready), daemon=True)
        self._process.start()
        try:
            if not ready.wait(60):
                raise TimeoutError("the line between the namespaces is not there after 60 s")
            for host, name in enumerate(names):
                peer = self.address(1 - host)
                ip("-n", name, "addr", "add", self.address(host), "peer", peer, "dev", DEVICE)
                ip("-n", name, "link", "set", DEVICE, "up")
                self._route(host, control)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process that makes the line."""
        assert self._process.pid is not None
        return self._process.pid

    def _route(self, host: int, control: str) -> None:
        there, words = f"{self.address(1 - host)}/32", ("dev", DEVICE, "congctl", control)
        self._in(self.namespace(host), "route", "replace", there, *words)

    def cut(self, host: int) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._in(self.namespace(host), "link", "set", DEVICE, "down")

    def mend(self, host: int) -> None:
        self._in(self.namespace(host), "link", "set", DEVICE, "up")
        self._route(host, self._control)

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.join()
