"""Frames that go out in the order in which they were given, also behind one that first waits for a write:
what it tells of must be on the disk before anybody hears it."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_DONE: Future[None] = Future()
_DONE.set_result(None)


class InOrder:
    """Thread-safe; no call waits, but `drain`. `put` is called with one frame after the other, `failed` once
    with the error of a write; nothing behind that goes out."""

    def __init__(self, put: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        self._put = put
        self._failed = failed
        # from the first frame on whose write is under way
        self._held: deque[tuple[Future[Any], Callable[[Any], bytes]]] = deque()
        self._changed = threading.Condition(threading.RLock())

    @property
    def idle(self) -> bool:
        """Nothing is held back."""
        return not self._held

    def add(self, frame: bytes) -> None:
        with self._changed:
            if not self._held:
                self._put(frame)
            else:
                self._held.append((_DONE, lambda _: frame))

    def add_after(self, write: "Future[T]", frame: Callable[[T], bytes]) -> None:
        """`frame(what the write gives)`, once it is done."""
        with self._changed:
            self._held.append((write, frame))
        write.add_done_callback(self._written)

    def _written(self, write: "Future[Any]") -> None:
        if (error := write.exception()) is not None:
            self._failed(error if isinstance(error, Exception) else RuntimeError(str(error)))
        with self._changed:
            while self._held and self._held[0][0].done() and not self._is_stuck():
                done, frame = self._held.popleft()
                self._put(frame(done.result()))
            self._changed.notify_all()

    def _is_stuck(self) -> bool:
        """Behind a write that has failed."""
        return bool(self._held) and self._held[0][0].done() and self._held[0][0].exception() is not None

    def drain(self, seconds: float) -> None:
        """Waits at most so long until nothing is held back; not behind a write that has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._is_stuck(), seconds)
