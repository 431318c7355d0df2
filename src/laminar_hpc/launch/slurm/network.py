"""At which address a node of a job is reached by the others, and how they learn it."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.observability import console

INTERFACE = "LAMINAR_INTERFACE"


class NetworkDown(LaminarError):
    """There is a network here that is down; it may come back."""


def addresses(down: bool = False) -> dict[str, str]:
    """The IPv4 addresses of this node's interfaces by name, without loopback; `down`: of those too."""
    here = psutil.net_if_addrs()
    names = set(here) if down else {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: entry.address
        for name, entries in here.items()
        for entry in entries
        if name in names and entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }


def own_address() -> str:
    """Of the interface that LAMINAR_INTERFACE names; else what the node's name resolves to, unless that is a
    loopback address of its own /etc/hosts; else of the first interface.

    Raises LaminarError where there is none, NetworkDown where it may come back."""
    here, everything, wanted = addresses(), addresses(down=True), os.environ.get(INTERFACE, "")
    if wanted:
        if wanted in here:
            return here[wanted]
        raise (NetworkDown if wanted in everything else LaminarError)(
            f"{INTERFACE}={wanted}: this node ({socket.gethostname()}) has no such interface with an "
            f"IPv4 address; it has {', '.join(here) or 'none'}: set it in slurm/site.sh"
        )
    for name in (os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        with suppress(OSError):
            if name and (address := socket.gethostbyname(name)) in everything.values():
                if address in here.values():
                    return address
                raise NetworkDown(f"the interface of this node's address {address} is down: ip link")
    if not here:
        raise (NetworkDown if everything else LaminarError)(
            f"this node ({socket.gethostname()}) has no network but loopback: ip link"
        )
    return next(iter(here.values()))


def await_own_address(seconds: float) -> str:
    """`own_address`, once the node's network is up: a job may start while a cable is out. Raises LaminarError
    after so many seconds, and at once where there is no network to wait for."""
    until, said = time.monotonic() + seconds, False
    while True:
        try:
            return own_address()
        except NetworkDown as error:
            if time.monotonic() > until:
                raise LaminarError(f"{error}; it did not come up within {seconds:.0f} s") from None
            if not said:
                print(console.line("waits", f"until the network is up: {error}"), flush=True)
            said = True
            time.sleep(1)


def use_interface(address: str) -> None:
    """Lets gloo, and where LAMINAR_INTERFACE says so NCCL, use the interface of this address: gloo would
    take that of the host name, which may be loopback."""
    name = next((name for name, mine in addresses().items() if mine == address), "")
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if name and os.environ.get(INTERFACE):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def await_file(path: Path, seconds: float) -> str:
    """The text of a file that the job's first node writes. Raises LaminarError after so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(FileNotFoundError):
            return path.read_text()
        time.sleep(0.05)
    raise LaminarError(
        f"the first node of the job did not write {path} within {seconds:.0f} s: it has no network, or the "
        "folder is not on a file system that all nodes share"
    )
