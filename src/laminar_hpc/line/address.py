"""Where the controller is and the keys to talk to it: `run_dir/controller.json`, mode 0600, new at every
launch.

The keys are CURVE pairs (ZeroMQ's authenticated encryption): whoever can read the run directory may talk to
the run, nobody else.
"""

import os
import socket
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.machine.processes import parent_process

ADDRESS_FILE = "controller.json"


class ControllerAddress(msgspec.Struct):
    run_id: str
    host: str
    port: int
    machine: str  # with pid: lets the workers beside it see its death at once
    pid: int
    server_public: str
    client_public: str
    client_secret: str
    launch: str = ""  # see `launch_id`
    store_id: str = ""  # of the store that it serves; "" until that is open


def launch_id() -> str:
    """Names the agent or torchrun that started this process; equal on all ranks of its world.

    A rank joins no other world's controller, even if both start on one run directory at the same moment."""
    names = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        names.append(parent_process())  # of one machine: run id and port may be the defaults
    return " ".join(names)


def new_address(run_id: str, host: str, machine: str) -> tuple[ControllerAddress, str]:
    """A fresh address (port still 0) and the controller's own secret key."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    address = ControllerAddress(
        run_id,
        host,
        0,
        machine,
        os.getpid(),
        server_public.decode(),
        client_public.decode(),
        client_secret.decode(),
        launch_id(),
    )
    return address, server_secret.decode()


def write_address(run_dir: Path, address: ControllerAddress) -> None:
    write_whole(run_dir / ADDRESS_FILE, msgspec.json.encode(address), mode=0o600)


def read_address(run_dir: Path) -> ControllerAddress | None:
    """The address as it stands now, or None while there is none."""
    try:
        return msgspec.json.decode((run_dir / ADDRESS_FILE).read_bytes(), type=ControllerAddress)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise LaminarError(
            f"{run_dir / ADDRESS_FILE} is not a controller's address ({error}); delete it and start again"
        ) from None


def own_address(host: str) -> str:
    """The IP address at which others reach this machine: loopback on one machine, else the way to `host`."""
    target = socket.gethostbyname(host)
    if target.startswith("127."):
        return target
    # a datagram socket picks the route and sends nothing
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return probe.getsockname()[0]


def keep_to_loopback(host: str) -> None:
    """Before gloo or NCCL are used in this process: a run on one machine listens nowhere else."""
    if host == "localhost" or host.startswith("127."):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
