"""The controller's end of all channels: one encrypted ROUTER socket that lets in only who holds the run's
client key.

Not a thread: the controller's loop polls it. Whoever gets in holds the run's key, so a frame that is no
message is a bug or another version of laminar_hpc: it comes out as `UnreadableMessage`, and the loop decides
what ends.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from laminar_hpc.cluster.address import ControllerAddress, new_address, write_address
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.data import Message
from laminar_hpc.messages.wire import AnyMessage, decode, encode


@dataclass(frozen=True)
class UnreadableMessage:
    """A frame that is no message, and why."""

    reason: str


class Hub:
    """Binds at construction and writes `run_dir/controller.json`."""

    def __init__(self, run_dir: Path, run_id: str, host: str, port: int, machine: str) -> None:
        self._context = zmq.Context()
        # ZeroMQ asks here (RFC 27) whether a client's key is welcome
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._address, secret = new_address(run_id, host, machine)
        self._client_key = self._address.client_public
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.LINGER, 2000)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"laminar")
        self._router.curve_server = True
        self._router.curve_secretkey = secret.encode()
        try:
            self._router.bind(f"tcp://{socket.gethostbyname(host)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            raise LaminarError(
                f"the controller cannot listen at {host}:{port} ({error}); set cluster.port=0 or "
                "cluster.host to an address of this machine"
            ) from None
        self._address.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        write_address(run_dir, self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._zap, zmq.POLLIN)

    @property
    def address(self) -> ControllerAddress:
        return self._address

    def poll(self, seconds: float, limit: int = 1000) -> list[tuple[str, AnyMessage | UnreadableMessage]]:
        """What has come, as (sender's identity, message): waits up to `seconds` for the first, then takes at
        most `limit` that are there."""
        messages: list[tuple[str, AnyMessage | UnreadableMessage]] = []
        timeout = int(seconds * 1000)
        while len(messages) < limit:
            events = dict(self._poller.poll(timeout))
            if not events:
                break
            if self._zap in events:
                self._admit()
            if self._router in events:
                identity, *frames = self._router.recv_multipart()
                name = identity.decode(errors="backslashreplace")
                try:
                    messages.append((name, decode(frames[-1] if frames else b"")))
                except msgspec.DecodeError as error:
                    messages.append((name, UnreadableMessage(str(error))))
                timeout = 0
        return messages

    def _admit(self) -> None:
        frames = self._zap.recv_multipart()
        version, request_id, mechanism, credentials = frames[0], frames[1], frames[5], frames[6:]
        welcome = (
            mechanism == b"CURVE"
            and len(credentials) == 1
            and z85.encode(credentials[0]).decode() == self._client_key
        )
        self._zap.send_multipart(
            [version, request_id, b"200" if welcome else b"400", b"" if welcome else b"unknown key", b"", b""]
        )

    def send(self, identity: str, message: Message) -> None:
        """Queues a message for a worker; one for a worker that has gone is dropped by the socket."""
        self._router.send_multipart([identity.encode(), encode(message)])

    def close(self) -> None:
        self._router.close()
        self._zap.close(0)
        self._context.term()
