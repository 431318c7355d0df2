"""A worker's encrypted socket to the controller."""

import zmq

from laminar_hpc.line.address import ControllerAddress
from laminar_hpc.line.messages.places import GateAddress

PING_SECONDS = 1.0
_RECONNECT_SECONDS = 3.0  # a connection that carries nothing for this long is made anew
_HANDSHAKE_SECONDS = 5.0  # the controller's loop takes part in it
_QUEUE_MESSAGES = 4096  # above the window of line/delivery.py, so that a send never waits for room


def connect(context: zmq.Context, identity: bytes, address: ControllerAddress) -> zmq.Socket:
    """Connects again by itself. Frames of a lost connection are gone."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.LINGER, 2000)
    dealer.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
    # where a full queue meets a broken connection libzmq aborts the process (zeromq/libzmq#3937); the hub's
    # window bounds what comes
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, int(PING_SECONDS * 1000))
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_RECONNECT_SECONDS * 1000))
    dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(_RECONNECT_SECONDS * 1000))
    dealer.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_SECONDS * 1000))
    connect_secured(dealer, address)
    return dealer


def connect_secured(dealer: zmq.Socket, address: ControllerAddress | GateAddress) -> None:
    """With the keys that the address names."""
    dealer.curve_serverkey = address.server_public.encode()
    dealer.curve_publickey = address.client_public.encode()
    dealer.curve_secretkey = address.client_secret.encode()
    dealer.connect(f"tcp://{address.host}:{address.port}")
