"""A keeper, which takes one call after the other: it has a process wait for the code, takes a call from the
socket that all keepers share, hands it over, bounds its time and output, ends all that has come of it, and
answers.

It runs no foreign code. It ends with the preloaded process, and a call ends with its client.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import time

from laminar_hpc.environments.sandbox import program
from laminar_hpc.environments.sandbox.output import BoundedOutput
from laminar_hpc.environments.sandbox.places import SandboxTier
from laminar_hpc.environments.sandbox.protocol import Failed, Result, decode_call
from laminar_hpc.environments.workers.framing import framed, receive_frame
from laminar_hpc.machine.processes import die_with_parent

_CHUNK = 1 << 16


class _Abandoned(Exception):
    """Nobody waits for the result."""


class _NoMore(Exception):
    """No call will come."""


def keep(control: socket.socket, place: SandboxTier | None, trouble: str, parent: int) -> None:
    """Answers the calls of the connections that come over `control`; with `trouble` where there is no place.
    Returns when nobody can send more, or the preloaded process, `parent`, has gone."""

    def end(number: int, frame: object) -> None:
        control.close()  # a client that sends calls there sees at once that nobody takes them
        raise _NoMore

    die_with_parent(signal.SIGTERM)
    with contextlib.suppress(_NoMore):
        while True:
            signal.signal(signal.SIGTERM, end)
            if os.getppid() != parent:
                return
            if place is None:
                _say(_next_call(control)[0], Failed(trouble))
            else:
                _One(place).keep(control)


def _next_call(control: socket.socket) -> tuple[socket.socket, bytes]:
    """A connection whose client is still there, and what it asks. Raises _NoMore."""
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:  # `end` has closed it, where nothing could be raised
            raise _NoMore from None
        if not packet:
            raise _NoMore
        connection = socket.socket(fileno=descriptors[0])
        with contextlib.suppress(ConnectionError):
            if (frame := receive_frame(connection)) is not None:
                return connection, frame
        connection.close()


def _say(connection: socket.socket, answer: Result | Failed) -> None:
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(framed(answer))


class _One:
    """One call."""

    def __init__(self, place: SandboxTier) -> None:
        self._place = place
        self._ready = mmap.mmap(-1, 1)  # shared with the process that waits: it has reached its place
        self._outputs: dict[int, BoundedOutput] = {}

    def keep(self, control: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            requests, given = socket.socketpair()
            pipes = os.pipe(), os.pipe()
            for reading, _ in pipes:
                os.set_blocking(reading, False)
                stack.callback(os.close, reading)
                self._outputs[reading] = BoundedOutput(self._place.limits.output_bytes)
            stack.enter_context(requests)
            try:
                streams = (given.fileno(), pipes[0][1], pipes[1][1])
                ended = self._place.start(self._wait_for_code, streams)
            except OSError as error:
                _say(_next_call(control)[0], Failed(f"no process can be started: {error}"))
                return
            finally:
                given.close()
                for _, writing in pipes:
                    os.close(writing)
            stack.callback(os.close, ended)
            self._run(control, requests, ended)

    def _run(self, control: socket.socket, requests: socket.socket, ended: int) -> None:
        connection, timed_out, begun, code = None, False, 0.0, 0
        try:
            connection, frame = _next_call(control)
            self._place.begin()
            begun = time.monotonic()
            call = decode_call(frame)
            with contextlib.suppress(ConnectionError):  # its process has ended: that is seen below
                requests.sendall(framed(call))
            timed_out = not self._ended_by(ended, begun + call.timeout_seconds, connection)
        except _Abandoned:
            return
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            code = self._place.end()
        _say(connection, self._answer(code, timed_out, time.monotonic() - begun))

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
        """Waits for the end and takes the output; False when the deadline comes first. Raises _Abandoned."""
        poller = select.poll()
        for descriptor in (ended, connection.fileno(), *self._outputs):
            poller.register(descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poller.poll(left * 1000)}
            for descriptor in ready & self._outputs.keys():
                if _read(descriptor, self._outputs[descriptor]) is None:
                    poller.unregister(descriptor)
            if connection.fileno() in ready:
                raise _Abandoned
            if ended in ready:
                return True
        return False


def _read(descriptor: int, output: BoundedOutput) -> bool | None:
    """Whether there was something; None at the end of the stream."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    output.add(chunk)
    return True if chunk else None
