"""The two ends of links that a relay has: a thread each, which makes its link and works on it until it breaks
or is replaced.

So the relay's main thread always listens to the controller, and can close a link on which a thread waits for
a neighbour that is stuck.
"""

import queue
import threading
from collections.abc import Callable

from laminar_hpc.policies.chain import chunk_bytes
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import LinkBroken
from laminar_hpc.weights.relay.chain import WeightStream, send_stream

MakeLink = Callable[[Callable[[], bool]], Link]  # its argument tells whether the link is no longer wanted
Down = Callable[[int, str], None]
Failed = Callable[[Exception], None]
Work = Callable[[Link], None]


class LinkEnd:
    """A thread on one link, which calls `work(link)` again and again: one publication, or a bounded wait for
    it. `down(epoch, why)` is called once if the link cannot be made or breaks, not when
    `close` was called; `failed(error)` on anything else."""

    def __init__(self, epoch: int, make: MakeLink, down: Down, failed: Failed, work: Work) -> None:
        self.epoch = epoch
        self._make = make
        self._down = down
        self._failed = failed
        self._work = work
        self._link: Link | None = None
        self._closing = False
        self.thread = threading.Thread(
            target=self._run, name=f"{type(self).__name__.lower()} {epoch}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        try:
            self._link = link = self._make(lambda: self._closing)
            while not self._closing:
                self._work(link)
        except LinkBroken as error:
            if not self._closing:
                self._down(self.epoch, str(error))
        except Exception as error:
            self._failed(error)
        finally:
            self.close()

    @property
    def closed(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Closes the link, which wakes the thread and the other end; the thread ends by itself."""
        self._closing = True
        if self._link is not None:  # else the thread closes it as soon as it is made
            self._link.close()

    def break_off(self, why: str) -> None:
        """Closes the link because what it should carry will not come, and says so."""
        if not self._closing:
            # first, so that the controller knows who is alive when the other end complains
            self._down(self.epoch, why)
            self.close()


class UpstreamEnd(LinkEnd):
    """Its `work` receives one publication."""


class DownstreamEnd(LinkEnd):
    """Passes on what is put into it, in order. `done(stream)` is called for each when it is no longer
    read."""

    def __init__(
        self,
        epoch: int,
        make: MakeLink,
        down: Down,
        failed: Failed,
        done: Callable[[WeightStream], None],
        relays: int,
        max_chunk: int,
    ) -> None:
        self.relays = relays  # that stand behind the link
        self._done = done
        self._max_chunk = max_chunk
        self._streams: queue.SimpleQueue[WeightStream | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: list[WeightStream] = []  # those that are not done; none once the link is closed
        super().__init__(epoch, make, down, failed, self._pass_on)

    @property
    def busy(self) -> bool:
        """There is a stream that is not done."""
        return bool(self._pending)

    def put(self, stream: WeightStream) -> None:
        """Every stream is done sooner or later; at once when the link is closed, as nothing is read any more
        then."""
        with self._lock:
            if not self._closing:
                self._pending.append(stream)
                return self._streams.put(stream)
        self._done(stream)

    def _finish(self, *streams: WeightStream) -> None:
        for stream in streams:
            with self._lock:
                if stream not in self._pending:
                    continue
                self._pending.remove(stream)
            self._done(stream)

    def _pass_on(self, link: Link) -> None:
        stream = self._streams.get()
        if stream is None:
            return
        try:
            if stream.chunk_bytes is None:  # it starts here
                size = stream.manifest.data_bytes
                stream.chunk_bytes = chunk_bytes(
                    size, self.relays, link.start_seconds, link.seconds_per_byte, self._max_chunk
                )
            send_stream(link, stream)
            link.weight_id = max(link.weight_id or 0, stream.manifest.weight_id)
        finally:
            self._finish(stream)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        super().close()
        self._finish(*self._pending)
        self._streams.put(None)
