"""The gate: one relay at the trainer's place serves the relays of other places from its machine's slots.

It listens on one address for connections that are authenticated and encrypted by CURVE, with key pairs of its
own, which those relays get from the controller. It answers requests and never waits for anybody: trainers and
the relays beside it do not know how fast or slow a place is.
"""

import errno
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.admission import CurveAuthenticator
from laminar_hpc.line.messages.places import GateAddress
from laminar_hpc.weights.places.shipment import PlaceFeed, Shipment
from laminar_hpc.weights.places.wire import (
    DOMAIN,
    HANDSHAKE_MILLISECONDS,
    REQUEST_BYTES_MAX,
    FetchedPiece,
    Gone,
    Next,
    Nothing,
    Offer,
    Reply,
    decode_request,
    encode,
)
from laminar_hpc.weights.slots import SlotReader

log = logging.getLogger(__name__)
_POLL_MILLISECONDS = 50
_CRYPTO_THREADS = 2


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
        keys = server_public.decode(), client_public.decode(), client_secret.decode()
        self.address = GateAddress(shown or host, number, *keys)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def _bind(self, shown: str, host: str, port: str) -> int:
        """At `shown`, or where that is another machine, which forwards, at `host`. Returns the port."""
        try:
            address = socket.gethostbyname(shown)
            try:
                self._router.bind(f"tcp://{address}:{port}")
            except zmq.ZMQError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
                self._router.bind(f"tcp://{host}:{port}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            raise LaminarError(
                f"the gate for relays of other places cannot listen at {shown}:{port} ({error}); set "
                "relay.gate to a free port of this machine"
            ) from None
        return int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def close(self) -> None:
        self._closing = True
        self._maker.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._admission.socket, zmq.POLLIN)
        try:
            while not self._closing:
                events = dict(poller.poll(_POLL_MILLISECONDS))
                if self._admission.socket in events:
                    self._admission.answer()
                if self._router in events:
                    self._serve(*self._router.recv_multipart())
        except Exception as error:
            if not self._closing:
                self._failed(error)
        finally:
            self._admission.close()
            self._context.destroy(0)

    def _serve(self, peer: bytes, *frames: bytes) -> None:
        try:
            reply, content = self._answer(b"".join(frames))
        except msgspec.DecodeError as error:
            log.warning("a relay of another place asked for what is no request (%s)", error)
            return
        self._router.send_multipart([peer, encode(reply), content], copy=False)

    def _answer(self, frame: bytes) -> tuple[Reply, bytes | memoryview]:
        request = decode_request(frame)
        if isinstance(request, Next):
            place = request.place
            if place not in self._feeds:
                self._feeds[place] = PlaceFeed(place, self._reader, self._maker)
            found = self._feeds[place].offer(request.held)
            return (Offer(found.number, found.size) if found else Nothing()), b""
        shipment = self._find(request.shipment)
        if shipment is None or request.piece not in range(shipment.pieces):
            return Gone(request.shipment), b""
        return FetchedPiece(shipment.number, request.piece), shipment.piece(request.piece)

    def _find(self, number: int) -> Shipment | None:
        there = (feed.shipment for feed in self._feeds.values())
        return next((each for each in there if each and each.number == number), None)
