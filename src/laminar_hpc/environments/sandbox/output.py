"""One stream of a call's output, bounded: its beginning and its end are kept."""


class BoundedOutput:
    """Holds at most about `limit` bytes, however many come."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, chunk: bytes) -> None:
        self._total += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    @property
    def truncated(self) -> bool:
        return self._total > 2 * self._half

    def text(self) -> str:
        """What is kept; where the middle is left out a line says how much."""
        tail = self._tail[-self._half :]
        left_out = self._total - len(self._head) - len(tail)
        cut = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return (bytes(self._head) + cut + tail).decode(errors="replace")
