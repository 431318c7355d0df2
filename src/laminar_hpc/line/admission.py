"""Who may connect: the encrypted sockets of a ZeroMQ context ask here about a client's key (RFC 27, ZAP)."""

import socket

import zmq
from zmq.utils import z85

# A stranger that does not say who it is gives its place back after this; so does a member that meets a
# controller in a long turn, and it comes again.
_HANDSHAKE_SECONDS = 5.0
_QUEUE_MESSAGES = 4096  # above the window of line/delivery.py; what the socket drops is sent again


class CurveAuthenticator:
    """Lets in who holds the secret of one of the keys (z85) in `users`, by which each frame that comes names
    its sender ("User-Id"). For the thread that polls `socket` and then calls `answer`; until it does, whoever
    connects waits."""

    def __init__(self, context: zmq.Context, *client_keys: str) -> None:
        self.users = dict.fromkeys(client_keys, "")
        # not a REP, which would wait for the rest of a request whose connection has broken
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind("inproc://zeromq.zap.01")
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def answer(self) -> None:
        """Answers one request, if one is there. A broken one has no answer: its client tries again."""
        try:
            peer, _, version, request_id, *_, mechanism, key = self.socket.recv_multipart(zmq.NOBLOCK)
        except (zmq.Again, ValueError):
            return
        user = self.users.get(z85.encode(key).decode()) if mechanism == b"CURVE" else None
        code, text = (b"400", b"unknown key") if user is None else (b"200", b"")
        named = (user or "").encode()
        self.socket.send_multipart([peer, b"", version, request_id, code, text, named, b""], zmq.NOBLOCK)

    def poll(self, router: zmq.Socket, milliseconds: int) -> bool:
        """Waits so long for a frame at `router`, and answers who asks meanwhile; whether a frame is there."""
        if router not in self._poller:
            self._poller.register(router, zmq.POLLIN)
        events = dict(self._poller.poll(milliseconds))
        if self.socket in events:
            self.answer()
        return router in events

    def close(self) -> None:
        self.socket.close(0)


def listen(router: zmq.Socket, host: str, port: int | str = "*") -> int:
    """Binds to an address of this machine, "*" = any free port; returns the port. Raises OSError."""
    try:
        router.bind(f"tcp://{socket.gethostbyname(host)}:{port}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from None
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def secured_router(context: zmq.Context, secret: str, message_bytes_max: int) -> zmq.Socket:
    """A ROUTER for holders of the key that the context's CurveAuthenticator lets in; not yet bound. `secret`:
    its own (z85)."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.LINGER, 2000)
    router.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    router.setsockopt(zmq.RCVHWM, 0)  # as in line/dealer.py; the members' windows bound it
    router.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_SECONDS * 1000))
    router.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
    router.setsockopt(zmq.ZAP_DOMAIN, b"laminar")
    router.curve_server = True
    router.curve_secretkey = secret.encode()
    return router
