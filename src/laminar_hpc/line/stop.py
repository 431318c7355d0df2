"""Asking a running job to stop in order: finish the step, checkpoint, leave with exit code 0.

Where roles wait for another controller and none comes, the request is left in `run_dir/stop_request` for the
next one, which takes it up with the roles that have outlived the last.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import ADDRESS_FILE, ControllerAddress, read_address
from laminar_hpc.line.dealer import connect_secured
from laminar_hpc.line.delivery import Header, encode_header
from laminar_hpc.line.messages.membership import StopRequest
from laminar_hpc.line.messages.wire import encode
from laminar_hpc.line.waiting import who_waits
from laminar_hpc.machine.files import durable

_LEFT = "stop_request"
_LOOK_SECONDS = 2.0  # between two looks whether another controller has come


def request_stop(run_dir: Path, reason: str, seconds: float = 15.0) -> bool:
    """Sends the request to the controller of `run_dir`, or to the one that takes its place meanwhile. Whether
    one has it; else the next one gets it. Raises LaminarError when no job runs there."""
    try:
        address = known = read_address(run_dir)
    except OSError as error:
        path = run_dir / ADDRESS_FILE
        raise LaminarError(f"{path} cannot be read ({error.strerror}): it is for the run's owner") from None
    if known is None:
        raise LaminarError(f"no job runs in {run_dir} (there is no controller.json)")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if address is not None and _is_sent(known := address, StopRequest(reason), seconds):
            return True
        if address is None:  # one is about to come
            time.sleep(0.1)
        with suppress(OSError):  # the file system fails as well
            address = read_address(run_dir)
    try:
        if who_waits(run_dir):
            durable.replace(run_dir / _LEFT, f"{known.store_id} {reason}".encode())
            return False
    except OSError as error:
        raise LaminarError(
            f"there is no controller, and the request cannot be left in {run_dir} for the next one "
            f"({error.strerror})"
        ) from None
    raise LaminarError(
        f"the controller at {known.host}:{known.port} was not reached "
        f"within {seconds:.0f} s; is the job of {run_dir} still running?"
    )


def ask_trainers_to_leave(run_dir: Path, reason: str) -> None:
    """Tells the controller that the trainers' job is to end, if there is a controller at the moment."""
    with suppress(OSError):
        if address := read_address(run_dir):
            _is_sent(address, StopRequest(reason, trainers_only=True), _LOOK_SECONDS)


def left_request(run_dir: Path, store_id: str) -> str:
    """Why the job over this store is to stop by a request that no controller has had; "" if there is none."""
    try:
        left_for, _, reason = (run_dir / _LEFT).read_text().partition(" ")
    except OSError:
        return ""
    return reason if left_for == store_id else ""


def request_is_left(run_dir: Path) -> bool:
    """For any store."""
    return (run_dir / _LEFT).exists()


def forget_request(run_dir: Path) -> None:
    """It was taken up, or its run is gone."""
    (run_dir / _LEFT).unlink(missing_ok=True)


def _is_sent(address: ControllerAddress, request: StopRequest, linger_seconds: float) -> bool:
    """False when nobody answers there for _LOOK_SECONDS."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.IDENTITY, f"cli:0:{os.getpid()}".encode())
        dealer.setsockopt(zmq.LINGER, int(linger_seconds * 1000))
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # send only once the encrypted connection stands
        connect_secured(dealer, address)
        if not dealer.poll(int(1000 * _LOOK_SECONDS), zmq.POLLOUT):
            return False
        dealer.send_multipart([encode_header(Header("", 0, 0, 0)), encode(request)])
        return True
    finally:
        dealer.close()
        context.term()
