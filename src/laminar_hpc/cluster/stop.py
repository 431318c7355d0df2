"""Asking a running job to stop in order: finish the step, checkpoint, leave with exit code 0."""

import os
import time
from pathlib import Path

import zmq

from laminar_hpc.cluster.address import read_address
from laminar_hpc.cluster.delivery import Header, encode_header
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.membership import StopRequest
from laminar_hpc.messages.wire import encode


def request_stop(run_dir: Path, reason: str, seconds: float = 5.0) -> None:
    """Sends the request to the controller of `run_dir`. Raises LaminarError when no job runs there or it
    cannot be reached."""
    address = read_address(run_dir)
    if address is None:
        raise LaminarError(f"no job runs in {run_dir} (there is no controller.json)")
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.IDENTITY, f"cli:0:{os.getpid()}".encode())
        dealer.setsockopt(zmq.LINGER, int(seconds * 1000))
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # send only once the encrypted connection stands
        dealer.curve_serverkey = address.server_public.encode()
        dealer.curve_publickey, dealer.curve_secretkey = (
            address.client_public.encode(),
            address.client_secret.encode(),
        )
        dealer.connect(f"tcp://{address.host}:{address.port}")
        deadline = time.monotonic() + seconds
        while not dealer.poll(100, zmq.POLLOUT):
            if time.monotonic() > deadline:
                raise LaminarError(
                    f"the controller at {address.host}:{address.port} was not reached "
                    f"within {seconds:.0f} s; is the job of {run_dir} still running?"
                )
        dealer.send_multipart([encode_header(Header("", 0, 0, 0)), encode(StopRequest(reason))])
    finally:
        dealer.close()
        context.term()
