"""Who may connect: the encrypted sockets of a ZeroMQ context ask here about a client's key (RFC 27, ZAP)."""

import zmq
from zmq.utils import z85


class CurveAuthenticator:
    """Lets in who holds the secret of one of the keys (z85) in `users`, by which each frame that comes names
    its sender ("User-Id"). For the thread that polls `socket` and then calls `answer`; until it does, whoever
    connects waits."""

    def __init__(self, context: zmq.Context, *client_keys: str) -> None:
        self.users = dict.fromkeys(client_keys, "")
        # not a REP, which would wait for the rest of a request whose connection has broken
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind("inproc://zeromq.zap.01")

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

    def close(self) -> None:
        self.socket.close(0)
