"""Requests to the bulk door, one at a time, each asked again until it is answered (line/bulk_server.py)."""

import secrets
import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.dealer import connect
from laminar_hpc.line.join_key import JoinKey
from laminar_hpc.line.messages.bulk import BulkRefused, Reply, Request, decode_reply, encode_bulk

_AGAIN_SECONDS = 6.0  # without an answer the connection is made anew
# a door with another key of its own ends the connection without a word, but so does a line that breaks then
_UNSAID = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | _UNSAID
_UNSAID_MAX = 8  # in a row
_BROKEN_SECONDS = 0.1  # from a connection that has broken to the next one


class KeyRefused(LaminarError):
    """The door is another run's, or the run of this key is over."""

    def __init__(self, key: JoinKey) -> None:
        super().__init__(
            f"{key.place} does not know this key: it is another run's, or its run is over; copy join.key of "
            "the run directory again"
        )


class BulkClient:
    """For one thread. `seconds`: how long a request is tried."""

    def __init__(self, key: JoinKey, seconds: float) -> None:
        self._key = key
        self._seconds = seconds
        self._context = zmq.Context()
        self._dealer: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._failures = 0  # handshakes in a row

    def ask(self, request: Request) -> tuple[Reply, bytes]:
        """Raises KeyRefused, LaminarError with the door's reason, or when nothing answers in time."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            if self._dealer is None:
                self._connect()
            assert self._dealer is not None
            self._dealer.send_multipart([encode_bulk(request), b""])
            answer = self._answer(min(deadline, time.monotonic() + _AGAIN_SECONDS))
            if answer is not None and isinstance(answer[0], BulkRefused):
                raise LaminarError(answer[0].reason)
            if answer is not None:
                return answer
            self._disconnect()
        raise LaminarError(
            f"{self._key.place} has not answered for {self._seconds:.0f} s: is the run going on, and does "
            "this machine reach that address?"
        )

    def close(self) -> None:
        self._disconnect()
        self._context.term()

    def _connect(self) -> None:
        self._dealer = connect(self._context, secrets.token_hex(8).encode(), self._key)
        self._monitor = self._dealer.get_monitor_socket(_REFUSALS | zmq.EVENT_DISCONNECTED)

    def _disconnect(self) -> None:
        if self._dealer is not None:
            self._dealer.disable_monitor()
            self._dealer.close(0)
        if self._monitor is not None:
            self._monitor.close(0)
        self._dealer = self._monitor = None

    def _answer(self, until: float) -> tuple[Reply, bytes] | None:
        assert self._dealer is not None and self._monitor is not None
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := until - time.monotonic()) > 0:
            events = dict(poller.poll(int(left * 1000) + 1))
            if self._dealer in events:
                self._failures = 0
                return _read(self._dealer.recv_multipart())
            if self._monitor in events:
                event = recv_monitor_message(self._monitor)["event"]
                self._failures += bool(event & _REFUSALS)
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or self._failures > _UNSAID_MAX:
                    raise KeyRefused(self._key)
                if event == zmq.EVENT_DISCONNECTED:  # with the request, or its answer
                    time.sleep(_BROKEN_SECONDS)
                    return None
        return None


def _read(frames: list[bytes]) -> tuple[Reply, bytes]:
    try:
        head, body = frames
        return decode_reply(head), body
    except (ValueError, msgspec.DecodeError) as error:
        raise LaminarError(f"its answer cannot be read ({error}): install the same laminar_hpc") from None
