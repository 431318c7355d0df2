"""A device that works behind the host's back, in host memory: what a GPU with NCCL does and gloo never shows.

Each stream is a queue with a thread of its own. `send` returns at once and reads its source when its turn
comes; `wait()` of its work only orders the caller's current stream; only an event that was reached tells the
host that something is done. Streams can be held (`held`), and so made as slow as a test wants. A peer that
dies leaves a kernel that waits for ever, until the group is aborted, as without NCCL's watchdog.

`FakeDevice` takes the place of weights/links/streams.py's devices (`used`).
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.weights.links import streams
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import host_store, reach_store

_PATIENCE_SECONDS = 30.0  # of a stream for another one; no test waits so long


class FakeEvent:
    """`awaited()` is called when the host looks at it in vain."""

    def __init__(self, awaited: Callable[[], object] = lambda: None) -> None:
        self.reached, self._awaited = threading.Event(), awaited

    def query(self) -> bool:
        if not self.reached.is_set():
            self._awaited()
        return self.reached.is_set()


class FakeStream:
    """Does one thing after the other, each when those before are done and the stream isn't held."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.idle = True  # nothing was ever enqueued
        self.free = threading.Event()
        self.free.set()
        threading.Thread(target=self._run, name=f"fake stream {name}", daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            self.free.wait()
            work()

    def enqueue(self, work: Callable[[], object]) -> None:
        self.idle = False
        self._work.put(work)

    def record(self, awaited: Callable[[], object] = lambda: None) -> FakeEvent:
        event = FakeEvent(awaited)
        self._work.put(event.reached.set)
        return event

    def wait(self, event: FakeEvent) -> None:
        self._work.put(lambda: event.reached.wait(_PATIENCE_SECONDS))


class FakeDevice(streams.Streams):
    """`default` is the current stream of every thread that has chosen none, which
    on a GPU is where the trainer trains."""

    def __init__(self, name: str = "GPU-fake") -> None:
        super().__init__(torch.device("cpu"))
        self._name, self.default = name, FakeStream("default")
        self.awaited: Callable[[], object] = lambda: None  # whenever the host waits for this device
        self.made: list[FakeStream] = []
        self.pairs: list[FakePair] = []
        self.registered: list[int] = []  # sizes of host memory
        self._current, self._places = threading.local(), list[tuple[int, int]]()
        self._kept: list[torch.Tensor] = []  # so that no host tensor ever takes a place of the device

    @property
    def name(self) -> str:
        return self._name

    @property
    def current(self) -> FakeStream:
        return getattr(self._current, "stream", None) or self.default

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(first <= tensor.data_ptr() < end for first, end in self._places)

    def stream(self) -> FakeStream:
        self.made.append(FakeStream(f"{self.name} {len(self.made)}"))
        return self.made[-1]

    @contextlib.contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def event(self) -> FakeEvent:
        return self.current.record(lambda: self.awaited())

    def after(self, event: FakeEvent) -> None:
        self.current.wait(event)

    def empty(self, size: int) -> torch.Tensor:
        memory = torch.full((max(1, size),), 0xEE, dtype=torch.uint8)
        self._kept.append(memory)
        self._places.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory[:size]

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xDD, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        self.registered.append(memory.nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.current.enqueue(lambda: target.copy_(source))

    def pair(self, store: dist.Store, rank: int, seconds: float) -> "FakePair":
        self.pairs.append(FakePair(self, store, rank, seconds))
        return self.pairs[-1]


class FakeWork:
    """Of a device's send or receive."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self.done, self.error = device, FakeEvent(), ""

    def is_completed(self) -> bool:
        return bool(self.error) or self.done.query()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns at once, whatever the time limit: it orders the current stream."""
        if self.error:
            raise RuntimeError(self.error)
        self._device.after(self.done)
        return True


class FakePair:
    """In the place of NCCL: a group of two with a stream of its own, over gloo."""

    def __init__(self, device: FakeDevice, store: dist.Store, rank: int, seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, 2, options)
        self._device, self._stream, self._other = device, FakeStream("nccl"), 1 - rank
        self._works: list[FakeWork] = []
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        return self._enqueue(lambda: self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        return self._enqueue(lambda: self._gloo.recv(tensors, peer, tag))

    def _enqueue(self, begin: Callable[[], dist.Work]) -> FakeWork:
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        work, given = FakeWork(self._device), self._device.event()
        self._works.append(work)

        def run() -> None:
            given.reached.wait(_PATIENCE_SECONDS)
            try:
                if not self.aborted:
                    begin().wait()
                    work.done.reached.set()
            except RuntimeError:
                pass  # a kernel that waits for a dead peer never ends by itself

        self._stream.enqueue(run)
        return work

    def abort(self) -> None:
        """The kernels leave the device; what they were to do is not done."""
        self.aborted = True
        with contextlib.suppress(RuntimeError):  # wakes who waits in gloo
            self._gloo.recv([torch.zeros(1)], self._other, 1).wait(timedelta(milliseconds=1))
        for work in self._works:
            if not work.done.query():
                work.error = "aborted"
                work.done.reached.set()


class LazyDevice(FakeDevice):
    """Its time passes only while a host waits for it: what was enqueued is done when an event is looked
    at."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._due = list[Callable[[], object]]()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._due.append(lambda: target.copy_(source))

    def event(self) -> FakeEvent:
        event = FakeEvent()

        def work() -> None:
            while self._due:
                self._due.pop(0)()
            event.reached.set()

        event._awaited = work
        return event


_here = threading.local()


@contextlib.contextmanager
def used(device: FakeDevice, relays: FakeDevice | None = None) -> Iterator[None]:
    """Whoever asks for the streams of the CPU gets those of `device`, but for threads in `here`, and for the
    threads of a relay's links where `relays` is given."""
    before = streams.KINDS["cpu"]

    def of_thread(_: torch.device) -> FakeDevice:
        name = threading.current_thread().name
        mine = relays if relays is not None and name.startswith(("upstreamend", "downstreamend")) else device
        return getattr(_here, "device", mine)

    streams.KINDS["cpu"] = of_thread
    try:
        yield
    finally:
        streams.KINDS["cpu"] = before


@contextlib.contextmanager
def here(device: FakeDevice) -> Iterator[None]:
    """This thread gets `device`: processes of a run have one each, and those of a test share theirs."""
    _here.device = device
    try:
        yield
    finally:
        del _here.device


def linked(
    sender: FakeDevice, receiver: FakeDevice, seconds: float = 10.0, transport: str = "nccl"
) -> tuple[Link, Link]:
    """(sending, receiving) end of a link between two devices. Raises what the sender's end raised."""
    store, port = host_store("127.0.0.1", seconds)
    other = reach_store("127.0.0.1", port, seconds)
    ends: dict[bool, Link | Exception] = {}

    def make(sends: bool) -> None:
        place = (store if sends else other, 1, 0, sends, "the peer", "127.0.0.1", torch.device("cpu"))
        try:
            with here(sender if sends else receiver):
                ends[sends] = Link(*place, seconds, seconds, transport=transport)
        except Exception as error:
            ends[sends] = error

    threads = [threading.Thread(target=make, args=(sends,), daemon=True) for sends in (True, False)]
    with used(sender):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 5)
    for sends in (True, False):
        assert sends in ends, "a link was not made in time"
        if isinstance(made := ends[sends], Exception):
            raise made
    return ends[True], ends[False]
