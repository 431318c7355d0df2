"""The bulk door: a second encrypted socket of the controller's side, with a thread of its own, for what is
too large for control messages. The controller's loop takes no part in it.

    rollouts --requests with their bytes--> `handle`, then once for all that waited `settle` --> replies

Whoever holds the run's join key is let in (line/join_key.py). What waits here is bounded by the windows of
those who send (store/payload/upload.py).
"""

import logging
import threading
from collections.abc import Iterable
from typing import Protocol

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.admission import CurveAuthenticator, listen, secured_router
from laminar_hpc.line.join_key import JoinKey
from laminar_hpc.line.messages.bulk import BulkRefused, Reply, Request, decode_request, encode_bulk

log = logging.getLogger(__name__)
_MESSAGE_BYTES_MAX = 8 << 20  # a peer that sends a larger one is cut off
_BYTES_AT_ONCE = 16 << 20  # that are taken before `settle`
_FRAMES_AT_ONCE = 1000
_LOOK_SECONDS = 0.2  # until the thread sees that it is to end
BulkAnswer = tuple[Reply, bytes]


class BulkHandler(Protocol):
    """Who does what is asked, called in the door's thread."""

    def handle(self, identity: str, request: Request, body: bytes) -> BulkAnswer | None:
        """The answer, or None for one that `settle` gives."""

    def settle(self) -> Iterable[tuple[str, BulkAnswer]]:
        """What is still owed, or asked, and to whom."""


class BulkServer:
    """Binds at construction and sets `key.port`: to `port`, or for 0 to that of `key` where it is free, else
    to any. Raises LaminarError where it cannot listen."""

    def __init__(self, key: JoinKey, secret: str, port: int, handler: BulkHandler) -> None:
        self._handler = handler
        self._context = zmq.Context()
        self._admission = CurveAuthenticator(self._context, key.client_public)
        self._router = secured_router(self._context, secret, _MESSAGE_BYTES_MAX)
        try:
            key.port = _bind(self._router, key.host, port, key.port)
        except OSError as error:
            self._context.destroy(0)
            raise LaminarError(
                f"nobody can join at {key.host}:{port} ({error}); set cluster.join_port=0 or cluster.host to "
                "an address of this machine"
            ) from None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bulk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is answered any more when this returns."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._admission.poll(self._router, int(_LOOK_SECONDS * 1000))
            try:
                self._take()
                for identity, answer in self._handler.settle():
                    self._put(identity.encode(), answer)
            except Exception:  # whoever waits asks again, and says so in the end
                log.exception("what came at the bulk door was not done")
        self._admission.close()
        self._router.close(0)
        self._context.term()

    def _take(self) -> None:
        size = 0
        for _ in range(_FRAMES_AT_ONCE):
            if size >= _BYTES_AT_ONCE:
                return
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            size += sum(map(len, frames))
            if (answer := self._answer(identity, frames)) is not None:
                self._put(identity, answer)

    def _answer(self, identity: bytes, frames: list[bytes]) -> BulkAnswer | None:
        try:
            if len(frames) != 2:
                raise LaminarError(f"it has {len(frames)} parts, not a request and its bytes")
            return self._handler.handle(identity.decode(), decode_request(frames[0]), frames[1])
        except (LaminarError, msgspec.DecodeError, UnicodeDecodeError) as error:
            return BulkRefused(str(error)), b""

    def _put(self, identity: bytes, answer: BulkAnswer) -> None:
        self._router.send_multipart([identity, encode_bulk(answer[0]), answer[1]], zmq.NOBLOCK)


def _bind(router: zmq.Socket, host: str, port: int, earlier: int) -> int:
    """Returns the port. Raises OSError."""
    if not port and earlier:
        try:
            return listen(router, host, earlier)
        except OSError as error:
            log.warning("port %d is taken (%s): rollouts elsewhere have to join anew", earlier, error)
    return listen(router, host, port or "*")
