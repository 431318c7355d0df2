"""One call: its keeper has a process wait for the code, hands it the call, bounds its time and output, ends
all that has come of it, and answers.

The keeper runs no foreign code. It ends when its client or the preloaded process has gone.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import time

from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.environments.framing import framed, receive_frame
from laminar_hpc.environments.sandbox import program
from laminar_hpc.environments.sandbox.output import Output
from laminar_hpc.environments.sandbox.places import Place
from laminar_hpc.environments.sandbox.protocol import Failed, Result, decode_call

_CHUNK = 1 << 16


class Abandoned(Exception):
    """Nobody waits for the result."""


def keep(orders: socket.socket, place: Place | None, trouble: str) -> None:
    """Answers the call of one connection, which comes over `orders`; with `trouble` where there is no
    place."""
    signal.signal(signal.SIGTERM, _abandon)
    die_with_parent(signal.SIGTERM)
    with contextlib.suppress(Abandoned):
        if place is None:
            connection, _ = _next_call(orders)
            connection.sendall(framed(Failed(trouble)))
        else:
            _Keeper(place).keep(orders)


def _abandon(number: int, frame: object) -> None:
    raise Abandoned


def _next_call(orders: socket.socket) -> tuple[socket.socket, bytes]:
    """Raises Abandoned when there is none to come."""
    packet, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
    if packet:
        connection = socket.socket(fileno=descriptors[0])
        with contextlib.suppress(ConnectionError):
            if (frame := receive_frame(connection)) is not None:
                return connection, frame
    raise Abandoned


class _Keeper:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._ready = mmap.mmap(-1, 1)  # shared with the process that waits: it has reached its place
        self._requests, self._given = socket.socketpair()
        self._pipes = os.pipe(), os.pipe()
        limit = place.limits.output_bytes
        self._outputs = {reading: Output(limit) for reading, _ in self._pipes}

    def keep(self, orders: socket.socket) -> None:
        for reading in self._outputs:
            os.set_blocking(reading, False)
        try:
            streams = (self._given.fileno(), self._pipes[0][1], self._pipes[1][1])
            ended = self._place.start(self._wait_for_code, streams)
        except OSError as error:
            connection, _ = _next_call(orders)
            connection.sendall(framed(Failed(f"no process can be started: {error}")))
            return
        code, timed_out, begun = 0, False, 0.0
        try:
            self._given.close()
            for _, writing in self._pipes:
                os.close(writing)
            connection, frame = _next_call(orders)
            self._place.begin()
            begun = time.monotonic()
            with contextlib.suppress(ConnectionError):  # its process has ended: that is seen below
                self._requests.sendall(framed(decode_call(frame)))
            deadline = begun + decode_call(frame).timeout_seconds
            timed_out = not self._ended_by(ended, deadline, connection)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            code = self._place.end()
        with contextlib.suppress(ConnectionError):
            connection.sendall(framed(self._answer(code, timed_out, time.monotonic() - begun)))
        connection.close()
        self._place.close()

    def _wait_for_code(self) -> None:
        self._ready[0] = 1
        program.run_next()

    def _answer(self, code: int, timed_out: bool, seconds: float) -> Result | Failed:
        for reading, output in self._outputs.items():
            while _read(reading, output):
                pass
        stdout, stderr = self._outputs.values()
        if not self._ready[0]:
            return Failed(stderr.text().strip() or f"its process ended with {code} before it was ready")
        truncated = stdout.truncated or stderr.truncated
        return Result(stdout.text(), stderr.text(), code, timed_out, truncated, seconds)

    def _ended_by(self, ended: int, deadline: float, connection: socket.socket) -> bool:
        """Waits for the end and takes the output; False when the deadline comes first. Raises Abandoned."""
        poller = select.poll()
        for descriptor in (ended, connection.fileno(), *self._outputs):
            poller.register(descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poller.poll(left * 1000)}
            for descriptor in ready & self._outputs.keys():
                if _read(descriptor, self._outputs[descriptor]) is None:
                    poller.unregister(descriptor)
            if connection.fileno() in ready:
                raise Abandoned
            if ended in ready:
                return True
        return False


def _read(descriptor: int, output: Output) -> bool | None:
    """Whether there was something; None at the end of the stream."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    output.add(chunk)
    return True if chunk else None
