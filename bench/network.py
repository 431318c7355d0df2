"""Hosts on one machine: network namespaces on a bridge, each behind a cable of a given rate (tc) that can be
cut; any two can be parted. Linux, root, iproute2.

Nothing is changed outside the namespaces made here. They are taken away by `close`, and by the next `Network`
if their maker was killed.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.processes import process_is_alive

CLONE_NEWNET = 0x40000000
_PREFIX = "laminar-net-"
_NOBODY = "02:00:00:00:00:01"  # the hardware address of none of them
_BURST = "128kb"  # of the token bucket: two of the largest packets that the kernel hands over


def ip(*words: object) -> None:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaminarError(
            f"ip {' '.join(map(str, words))}: {done.stderr.strip()}; "
            "network namespaces need root and iproute2"
        )


def missing() -> str:
    """Why no namespaces can be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root; run this as root"
    tools = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(tools)} not found; install iproute2" if tools else ""


def remove_abandoned() -> None:
    """Namespaces whose maker is dead."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not process_is_alive(int(pid)):
            ip("netns", "del", path.name)


def enter(namespace: str | None) -> None:
    """The calling process, which has no other thread yet, lives in this network namespace from now on."""
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


class Network:
    """`hosts` namespaces with addresses 10.77.0.1, 10.77.0.2, ...; each end of each cable sends at most
    `mbit` Mbit/s (None: unlimited)."""

    def __init__(self, hosts: int, mbit: float | None) -> None:
        remove_abandoned()
        self._made: list[str] = []
        self._bridge = self._namespace("bridge")
        try:
            self._in(self._bridge, "link", "add", "br0", "type", "bridge")
            self._in(self._bridge, "link", "set", "br0", "up")
            for host in range(hosts):
                self._connect(host, mbit)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _in(namespace: str, *words: object) -> None:
        ip("-n", namespace, *words)

    def _namespace(self, name: object) -> str:
        full = f"{_PREFIX}{os.getpid()}-{name}"
        ip("netns", "add", full)
        self._made.append(full)
        self._in(full, "link", "set", "lo", "up")
        return full

    def _connect(self, host: int, mbit: float | None) -> None:
        name, port = self._namespace(host), f"port{host}"
        ip("link", "add", port, "netns", self._bridge, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._in(self._bridge, "link", "set", port, "master", "br0", "up")
        self._in(name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._in(name, "link", "set", "eth0", "up")
        for namespace, device in ((name, "eth0"), (self._bridge, port)):
            if mbit is not None:
                words = (
                    f"qdisc add dev {device} root tbf rate {mbit}mbit burst {_BURST} latency 100ms".split()
                )
                done = subprocess.run(
                    ["tc", "-n", namespace, *words], capture_output=True, text=True, check=False
                )
                if done.returncode != 0:
                    raise LaminarError(
                        f"tc {' '.join(words)}: {done.stderr.strip()}; "
                        "the kernel needs the tbf scheduler (sch_tbf)"
                    )

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int) -> str:
        return f"{_PREFIX}{os.getpid()}-{host}"

    def cut(self, host: int) -> None:
        """Pulls the host's cable: nothing gets through, and nobody is told."""
        self._in(self._bridge, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        self._in(self._bridge, "link", "set", f"port{host}", "up")

    def part(self, one: int, other: int) -> None:
        """Nothing gets through between these two, and nobody is told; both still reach all others."""
        for here, there in ((one, other), (other, one)):
            words = (
                "neigh",
                "replace",
                self.address(there),
                "lladdr",
                _NOBODY,
                "dev",
                "eth0",
                "nud",
                "permanent",
            )
            self._in(self.namespace(here), *words)

    def join(self, one: int, other: int) -> None:
        """Undoes `part`."""
        for here, there in ((one, other), (other, one)):
            self._in(self.namespace(here), "neigh", "del", self.address(there), "dev", "eth0")

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._made.clear()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
