"""The gate: one relay at the trainer's place serves the relays of other places from its machine's slots.

It listens on one address for connections that are authenticated and encrypted by CURVE, with key pairs of its
own, which those relays get from the controller. It answers requests, those for something newer as soon as
there is, and never waits for anybody: trainers and the relays beside it do not know how fast or slow a place
is.
"""

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.admission import CurveAuthenticator, listen
from laminar_hpc.line.messages.gate import (
    AHEAD,
    DOMAIN,
    HANDSHAKE_MILLISECONDS,
    HELD_SECONDS,
    OUTAGE_SECONDS,
    REQUEST_BYTES_MAX,
    STREAMS,
    Fetch,
    FetchedPiece,
    Gone,
    Next,
    Nothing,
    Reply,
    decode_request,
    encode,
)
from laminar_hpc.line.messages.places import GateAddress
from laminar_hpc.weights.places.shipment import PlaceFeed, Shipment
from laminar_hpc.weights.slots import SlotReader

log = logging.getLogger(__name__)
_POLL_MILLISECONDS = 50
_CRYPTO_THREADS = 2
GONE_SECONDS = 2 * OUTAGE_SECONDS


@dataclass
class _Question:
    """For a piece of a shipment that is not there yet: of which connection, and until when it is kept."""

    peer: bytes
    asked: Next
    until: float


class Gate:
    """Listens from its construction until `close`, which any thread may call. `address`: for the
    controller."""

    def __init__(self, host: str, gate: str, reader: SlotReader, failed: Callable[[Exception], None]) -> None:
        """`host`: an address of this machine; `gate`: relay.gate; `failed` hears of what ends its thread.
        Raises LaminarError when it cannot listen there."""
        shown, _, port = gate.rpartition(":")
        self._reader = reader
        self._failed = failed
        self._closing = False
        self._feeds: dict[str, PlaceFeed] = {}
        self._questions: dict[str, list[_Question]] = {}  # by place
        self._look_at = 0.0  # (monotonic) the next look for what they ask for
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # never while somebody may still call `look`
        self._maker = ThreadPoolExecutor(1, "gate-maker")
        self._context = zmq.Context(io_threads=_CRYPTO_THREADS)
        server_public, secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._admission = CurveAuthenticator(self._context, client_public.decode())
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        self._router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        self._router.linger = 0
        self._router.curve_server = True
        self._router.curve_secretkey = secret
        number = self._bind(shown or host, host, port or "*")
        self._poller = zmq.Poller()
        for each in (self._router, self._admission.socket, self._wake):
            self._poller.register(each, zmq.POLLIN)
        keys = server_public.decode(), client_public.decode(), client_secret.decode()
        self.address = GateAddress(shown or host, number, *keys)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def _bind(self, shown: str, host: str, port: str) -> int:
        """At `shown`, or where that is another machine, which forwards, at `host`. Returns the port."""
        try:
            try:
                return listen(self._router, shown, port)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
                return listen(self._router, host, port)
        except OSError as error:
            self._context.destroy(0)
            raise LaminarError(
                f"the gate for relays of other places cannot listen at {shown}:{port} ({error}); set "
                "relay.gate to a free port of this machine"
            ) from None

    def close(self) -> None:
        self._closing = True
        self._maker.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """There may be newer weights, or a shipment; for any thread."""
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                events = dict(self._poller.poll(_POLL_MILLISECONDS))
                if self._admission.socket in events:
                    self._admission.answer()
                if self._wake in events:
                    os.eventfd_read(self._wake)
                    self._look_at = 0.0
                if self._router in events:
                    self._serve_waiting()
                now = time.monotonic()
                if now >= self._look_at:
                    self._look_at = now + _POLL_MILLISECONDS / 1000
                    self._look_again(now)
                    self._forget_gone(now)
        except Exception as error:
            if not self._closing:
                self._failed(error)
        finally:
            self._admission.close()
            self._context.destroy(0)

    def _serve_waiting(self) -> None:
        """Those of a while: others wait to be admitted."""
        for _ in range(STREAMS * AHEAD):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = decode_request(b"".join(frames))
            except msgspec.DecodeError as error:
                log.warning("a relay of another place asked for what is no request (%s)", error)
                continue
            if isinstance(request, Next):
                self._keep(peer, request)
            else:
                self._send(peer, *self._fetched(request))

    def _send(self, peer: bytes, reply: Reply, content: bytes | memoryview = b"") -> None:
        self._router.send_multipart([peer, encode(reply), content], copy=False)

    def _keep(self, peer: bytes, request: Next) -> None:
        place, until = request.place, time.monotonic() + HELD_SECONDS
        if place not in self._feeds:
            self._feeds[place] = PlaceFeed(place, self._reader, self._maker, self.look)
        self._questions.setdefault(place, []).append(_Question(peer, request, until))
        self._look_at = 0.0

    def _look_again(self, now: float) -> None:
        """For what the places wait for."""
        for place, questions in self._questions.items():
            feed = self._feeds[place]
            for question in questions:
                if question.asked.piece == 0:
                    feed.offer(question.asked.held)
            there, kept = feed.shipment if feed.is_idle else None, []
            for question in sorted(questions, key=lambda each: each.asked.piece):
                asked = question.asked
                if there is not None and there.serves(asked.held):
                    self._send(question.peer, *_piece(there, asked.piece))
                elif now > question.until:
                    self._send(question.peer, Nothing(asked.piece))
                else:
                    kept.append(question)
            self._questions[place] = kept

    def _fetched(self, request: Fetch) -> tuple[Reply, bytes | memoryview]:
        shipment = self._find(request.shipment)
        if shipment is None or request.piece not in range(shipment.pieces):
            return Gone(request.shipment, request.piece), b""
        return _piece(shipment, request.piece)

    def _find(self, number: int) -> Shipment | None:
        for feed in self._feeds.values():
            if (there := feed.shipment) is not None and there.number == number:
                feed.heard = time.monotonic()
                return there
        return None

    def _forget_gone(self, now: float) -> None:
        """Frees the images of places that have not asked for longer than their links would wait."""
        gone = [
            place
            for place, feed in self._feeds.items()
            if feed.is_idle and now - feed.heard > GONE_SECONDS and not self._questions.get(place)
        ]
        for place in gone:
            log.info("place %s asks for nothing any more: its image is freed", place)
            del self._feeds[place]
            self._questions.pop(place, None)


def _piece(shipment: Shipment, number: int) -> tuple[Reply, bytes | memoryview]:
    """No bytes behind the last one."""
    content = shipment.piece(number) if number in range(shipment.pieces) else b""
    return FetchedPiece(shipment.number, number, shipment.size), content
