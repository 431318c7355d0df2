"""A network between a worker and its controller that a test can cut: a TCP proxy in a thread."""

import contextlib
import selectors
import socket
import struct
import threading

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


class Proxy:
    """Forwards to `target` on loopback. `reset` breaks all connections; while `stalled` no byte passes and
    nothing is said, as where packets are dropped; `garble` spoils what comes from the target next; `cuts`:
    all connections break each time that so many bytes have passed, ascending; `record` gets what goes to the
    target."""

    def __init__(self, target: int) -> None:
        self.cuts = list[int]()
        self.record: bytearray | None = None
        self._target, self.stalled, self.garble, self.passed = target, False, False, 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._broken = threading.Event()
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Returns when all connections are broken."""
        self._broken.clear()
        self._cut = True
        assert self._broken.wait(10)

    def close(self) -> None:
        self._running = False
        self._thread.join(10)
        self._drop()
        self._listener.close()

    _cut = False

    def _run(self) -> None:
        self._listener.setblocking(False)
        while self._running:
            if self._cut:
                self._drop()
                self._cut = False
                self._broken.set()
            if self.stalled:
                threading.Event().wait(0.01)
                continue
            with selectors.DefaultSelector() as ready:
                ready.register(self._listener, selectors.EVENT_READ)
                for pair in self._pairs:
                    ready.register(pair[0], selectors.EVENT_READ, (pair, pair[1]))
                    ready.register(pair[1], selectors.EVENT_READ, (pair, pair[0]))
                for key, _ in ready.select(0.01):
                    if key.data is None:
                        self._accept()
                    elif key.data[0] in self._pairs and not self._pass(key.data[0], key.fileobj, key.data[1]):
                        self._pairs.remove(key.data[0])
                        for end in key.data[0]:
                            end.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            self._pairs.append((client, socket.create_connection(("127.0.0.1", self._target), 5)))
        except OSError:  # the controller has gone
            client.close()

    def _pass(self, pair: tuple[socket.socket, ...], source: object, sink: socket.socket) -> bool:
        assert isinstance(source, socket.socket)
        try:
            data = source.recv(_CHUNK)
            if self.garble and sink is pair[0]:
                data, self.garble = bytes(255 - byte for byte in data), False
            if self.record is not None and sink is pair[1]:
                self.record += data
            sink.sendall(data)
        except OSError:
            return False
        self.passed += len(data)
        if self.cuts and self.passed >= self.cuts[0]:
            del self.cuts[0]
            self._cut = True
        return bool(data)

    def _drop(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
        self._pairs.clear()
