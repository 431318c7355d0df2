"""Two-member groups: one trainer rank and one relay, or one relay and the next, each made in an epoch of its
own.

Only two members, so that no cycle of waits can form; a dead peer breaks its own link, never the process. The
sending end hosts the store on the run's own address (loopback unless configured); gloo binds to the same
address. Between devices of different machines chunks go over NCCL (weights/links/transport.py).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.links.link_device import DeviceEnd
from laminar_hpc.weights.links.link_waits import Waiter
from laminar_hpc.weights.links.meeting import MEET_SECONDS, LinkBroken, agree, first_line
from laminar_hpc.weights.links.streams import StreamEvent, streams_of
from laminar_hpc.weights.links.transport import NCCL
from laminar_hpc.weights.links.window import Window, mapped

_PROBE_BYTES = 1 << 20
_WATCH_SECONDS = 0.1
_BYTES_MAX = 1 << 28  # of one message: layouts and sums
_NEVER_SENT = 1  # a tag under which nothing is ever sent


@dataclass
class _Placed:
    """A chunk in the sender's window: where it is, and the receiver's message that it has been copied."""

    note: torch.Tensor  # int64 [2]: first byte, number of bytes
    noted: dist.Work
    answer: torch.Tensor
    answered: dist.Work | None = None  # the sender's wait for it


Posted = dist.Work | _Placed  # what `Link.finish` waits for


class Link:
    """One direction: the sender has rank 0, the receiver rank 1. Every operation is bounded by `seconds`, the
    meeting by `meet_seconds`.

    Bytes and tensors in host memory go over gloo, which lets an idle receiver sleep. With a `device_end`
    chunks lie in the ends' devices and go over NCCL; else in host memory. An operation that fails breaks the
    link for good, at both ends. One thread may use a link, any other may `close` it.
    """

    wire_bytes: int | None = None  # of what came last, where the link compresses it
    device_end: DeviceEnd | None = None  # where chunks go from device to device
    closed = False  # from this end
    bytes_sent = 0  # of all frames and tensors
    weight_id: int | None = None  # the newest that went over it whole, so that the receiver has it
    _waiter: Waiter | None = None
    _window: Window | None = None  # the sender's, if the receiver has mapped it
    _there: torch.Tensor | None = None  # what the receiver has mapped

    def __init__(
        self,
        store: dist.Store,
        epoch: int,
        number: int,
        sender: bool,
        peer: str,
        address: str,
        device: torch.device,
        seconds: float,
        meet_seconds: float = MEET_SECONDS,
        given_up: Callable[[], bool] = lambda: False,
        leave: bool = False,
        window: Window | None = None,
        transport: str = "auto",
    ) -> None:
        """Raises LinkBroken when the other end does not come, or as soon as `given_up()` holds before it has
        come; PermanentFailure at the sender when `transport` cannot be.

        `leave`: whoever waits on it leaves as soon as it is closed, in every case; costs a change of threads
        for each wait. `window`: of the sender; where the receiver can map it, chunks that lie in it stay
        there until they are copied to where they go. `transport`: relay.transport, which the sender's holds.
        """
        self.epoch = epoch
        self.peer = peer
        self.seconds = seconds
        self.device = device
        self._me, self._other = (0, 1) if sender else (1, 0)
        self._store = store  # lives as long as the link
        self._waiter = Waiter() if leave else None
        prefix = dist.PrefixStore(f"laminar/{epoch}/{number}", store)
        limit = min(seconds, meet_seconds)
        try:
            streams = streams_of(device)
            self.transport = agree(prefix, sender, transport, streams.name, peer, limit, given_up)
            self._frames = self._group(prefix, address, limit)
            if self.transport == NCCL:
                self.device_end = DeviceEnd(streams, dist.PrefixStore("nccl", prefix), self._me, seconds)
            self._measure(seconds if self.device_end else limit)  # NCCL gets ready at the first use
            self._window, self._there = self._meet_window(sender, None if self.device_end else window, limit)
        except LaminarError:
            self._give_up()
            raise
        except (dist.DistError, RuntimeError) as error:
            self._give_up()
            text = f"it did not join epoch {epoch} ({first_line(error)})"
            raise LinkBroken(f"no link to {peer} within {limit:.0f} s: {text}") from None

    def _group(self, store: dist.Store, address: str, limit: float) -> dist.Backend:
        """For frames, and for chunks in host memory."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=limit)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(store, self._me, 2, options)

    def memory(self, size: int) -> torch.Tensor:
        """uint8 [size], where chunks lie."""
        if self.device_end is None:
            return torch.empty(size, dtype=torch.uint8)
        return self.device_end.memory(size)

    def reach(self, event: StreamEvent) -> None:
        """Waits until an event of `device_end`."""
        assert self.device_end is not None
        with self._broken():
            self.device_end.reach(event, self.seconds)

    # ---- tensors -------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous tensor on this link's device; returns when it may be overwritten."""
        self.finish(self.post_send(tensor), tensor)

    def post_send(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to send a contiguous tensor on this link's device or the host; it must stay as it is until
        `finish` has returned."""
        return self._start(True, tensor)

    def post(self, tensor: torch.Tensor) -> dist.Work:
        """Gets ready to receive into a contiguous tensor where the sender has it, behind those posted before;
        `finish` waits for it."""
        return self._start(False, tensor)

    def finish(self, work: Posted, tensor: torch.Tensor) -> torch.Tensor:
        """Waits until what was posted is there, or has left and may be overwritten."""
        if isinstance(work, _Placed):
            assert work.answered is not None, "what was taken ends with `taken`"
            self._finish(work.noted, work.note)
            self._finish(work.answered, work.answer)
        else:
            self._finish(work, tensor)
        return tensor

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Receives into a contiguous tensor on this link's device."""
        return self.finish(self.post(tensor), tensor)

    # ---- chunks, which may lie in the sender's window ------------------------------------------------------

    def give(self, chunk: torch.Tensor) -> Posted:
        """Does what `post_send` does, for a receiver that uses `take`."""
        if self._window is None:
            return self.post_send(chunk)
        note, answer = (
            torch.tensor([self._window.place(chunk), chunk.nbytes]),
            torch.zeros(1, dtype=torch.int64),
        )
        work = _Placed(note, self._start(True, note), answer, self._start(False, answer))
        self.bytes_sent += chunk.nbytes - note.nbytes  # as it would be without a window
        return work

    def take(self, target: torch.Tensor) -> Posted:
        """Does what `post` does, for what comes by `give`; `taken` ends it."""
        if self._there is None:
            return self.post(target)
        note = torch.zeros(2, dtype=torch.int64)
        return _Placed(note, self._start(False, note), torch.zeros(1, dtype=torch.int64))

    @contextlib.contextmanager
    def taken(self, work: Posted, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Where the chunk is once it is there: `target`, or the sender's window, which holds it until the
        block ends."""
        if self._there is None or not isinstance(work, _Placed):
            yield self.finish(work, target)
            return
        self._finish(work.noted, work.note)
        first, size = work.note.tolist()
        if size != target.nbytes or not 0 <= first <= self._there.numel() - size:
            raise LinkBroken(
                f"{self.peer} gave bytes {first} to {first + size} "
                f"of its window in place of a chunk of {target.nbytes}"
            )
        yield self._there[first : first + size]
        self._finish(self._start(True, work.answer), work.answer)

    def _meet_window(
        self, sender: bool, window: Window | None, seconds: float
    ) -> tuple[Window | None, torch.Tensor | None]:
        """The sender's, if the receiver has mapped it, and what the receiver has mapped."""
        answer = torch.zeros(1, dtype=torch.int64)
        if sender:
            self.send_bytes(window.ticket if window is not None else b"")
            self._finish(self._start(False, answer), answer, seconds)
            return (window if answer.item() else None), None
        there = mapped(self.receive_bytes(idle_seconds=seconds))
        answer[0] = there is not None
        self._finish(self._start(True, answer), answer, seconds)
        return None, there

    # ---- frames of bytes -----------------------------------------------------------------------------------

    def send_bytes(self, content: bytes) -> None:
        """A length, then the bytes."""
        for tensor in (
            torch.tensor([len(content)]),
            torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8),
        ):
            self._finish(self._start(True, tensor), tensor)

    def receive_bytes(self, idle_seconds: float | None = None) -> bytes:
        """What `send_bytes` sent, which is waited for `idle_seconds`; more than _BYTES_MAX is refused."""
        head = torch.zeros(1, dtype=torch.int64)
        self._finish(self._start(False, head), head, idle_seconds)
        length = int(head.item())
        if not 0 <= length <= _BYTES_MAX:
            raise LinkBroken(f"{self.peer} announced {length} bytes; at most {_BYTES_MAX} are taken")
        body = torch.zeros(max(1, length), dtype=torch.uint8)
        self._finish(self._start(False, body), body)
        return bytes(body[:length].numpy())

    # ---- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Breaks the link: whoever waits on it, here or at the other end, gets LinkBroken. From any thread,
        any number of times.

        At once, but for one whose message was cut in the middle, whom gloo does not wake: with `leave` that
        one as well, else after `seconds`. Nothing is read from or written to its tensor any more.
        """
        self.closed = True
        if self.device_end is not None:
            self.device_end.abort()
        # gloo's abort() does not wake a waiter; a wait that runs out closes all
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._frames.recv([torch.zeros(1)], self._other, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self._leave()

    def _give_up(self) -> None:
        if self.device_end is not None:
            self.device_end.abort()
        self._leave()

    def _leave(self) -> None:
        if self._waiter is not None:
            self._waiter.leave()

    @contextlib.contextmanager
    def closed_when(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Closes the link during the block as soon as `condition()` holds, which another thread looks at
        again and again."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_WATCH_SECONDS):
                if condition():
                    return self.close()

        watcher = threading.Thread(target=watch, name="link-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    # ---- how fast it is ------------------------------------------------------------------------------------

    def _measure(self, limit: float) -> None:
        """Ts, the start-up time of a chunk, from the quickest of a few tiny exchanges, and Tb, seconds per
        byte, from a larger one."""
        took = []
        # the caller's stream may be the one that trains
        ordered = contextlib.nullcontext if self.device_end is None else self.device_end.ordered
        for size in (*(8,) * 6, *(_PROBE_BYTES,) * 2):
            with ordered():
                probe, echo = self.memory(size), self.memory(8)
                began = time.monotonic()
                for tensor, mine in ((probe, self._me == 0), (echo, self._me == 1)):
                    self._finish(self._start(mine, tensor), tensor, limit)
                took.append(time.monotonic() - began)
        self.start_seconds = min(took[1:6])
        self.seconds_per_byte = (
            max(min(took[6:]) - self.start_seconds, 1e-3 * self.start_seconds) / _PROBE_BYTES
        )

    def sent(self, size: int, chunks: int, seconds: float) -> None:
        """Learns Tb from a transfer of `size` bytes in `chunks` that took `seconds`: half of the old value,
        half of the new."""
        if size >= _PROBE_BYTES:
            self.seconds_per_byte = (
                self.seconds_per_byte + max(seconds - chunks * self.start_seconds, 0.1 * seconds) / size
            ) / 2

    # ---- one operation -------------------------------------------------------------------------------------

    def _start(self, sends: bool, tensor: torch.Tensor) -> dist.Work:
        self.bytes_sent += tensor.nbytes if sends else 0
        with self._broken():
            if self.device_end is not None and self.device_end.holds(tensor):
                return self.device_end.start(sends, tensor)
            begin = self._frames.send if sends else self._frames.recv
            return begin([tensor], self._other, 0)

    def _finish(self, work: dist.Work, tensor: torch.Tensor, seconds: float | None = None) -> None:
        limit = seconds or self.seconds
        with self._broken():
            if self.device_end is not None and self.device_end.holds(tensor):
                self.device_end.finish(work, limit)
            elif self._waiter is None:
                work.wait(timedelta(seconds=limit))
            else:
                self._waiter.wait(work, timedelta(seconds=limit))

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        """Around what may fail: it says whom the link was to."""
        try:
            yield
        except LinkBroken:
            raise
        except (dist.DistError, RuntimeError) as error:
            if self.device_end is not None:
                self.device_end.abort()
            raise LinkBroken(f"the link to {self.peer} broke ({first_line(error)})") from None
