"""What one node of an allocation sees, for `laminar slurm check`, which starts this on all of them:

    srun ... python -m laminar_hpc.launch.slurm.probe FOLDER NAME

Node 0 answers the others at a port (FOLDER/NAME/head says where), so that each measures its way there and
its clock against the head's. Then all meet in a gloo group and pass a tensor around. The findings are one
line of JSON, in FOLDER/NAME/node<N>.json and on no terminal.
"""

import os
import platform
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.file_systems import file_system
from laminar_hpc.launch.doctor.packages import gpus, installed
from laminar_hpc.launch.slurm.network import addresses, await_file, own_address, use_interface
from laminar_hpc.machine.files import durable

MEET_SECONDS = 15.0  # for the head to say where it is, and for all to meet
_ROUNDS = 20  # of asking for the head's clock; the fastest counts
_BYTES = 64 << 20  # of a broadcast
_BROADCASTS = 4
_SYNCS = 20


class Seen(msgspec.Struct):
    """Of one node. Seconds are relative to the head's clock; -1 = could not be measured; `wrong` says why."""

    node: int
    host: str = ""
    address: str = ""
    interface: str = ""
    versions: dict[str, str] = {}
    gpus: list[str] = []
    nofile: int = 0  # -1 = no limit
    memlock: int = 0
    shm_bytes: int = 0
    clock_seconds: float = 0.0
    round_trip_seconds: float = -1.0
    file_system: str = ""
    storage: dict[str, str] = {}  # what does not work there
    sync_seconds: float = -1.0
    broadcast_bytes_per_second: float = -1.0
    wrong: dict[str, str] = {}


def main(arguments: list[str]) -> int:
    """Always 0: whoever reads the findings judges them."""
    folder = Path(arguments[0]) / arguments[1]
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_JOB_NUM_NODES"])
    seen = Seen(node, socket.gethostname())
    here(seen)
    looks: dict[str, Callable[[], None]] = {
        "network": lambda: rendezvous(seen, folder),
        "storage": lambda: storage(seen, folder),
        "broadcast": lambda: broadcast(seen, folder, nodes),
    }
    for name, look in looks.items():
        try:
            look()
        except Exception as error:  # whatever a library raises is a finding
            lines = str(error).splitlines()
            seen.wrong[name] = lines[0] if lines else type(error).__name__
    durable.replace(folder / f"node{node}.json", msgspec.json.encode(seen))
    return 0


def here(seen: Seen) -> None:
    """What the node can say by itself."""
    packages = ("torch", "sglang", "megatron-core")
    seen.versions = {"laminar_hpc": __version__, "python": platform.python_version()}
    seen.versions |= {name: installed(name) or "absent" for name in packages}
    seen.gpus = gpus()
    seen.nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    seen.memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        seen.shm_bytes = shm.f_frsize * shm.f_bavail


def rendezvous(seen: Seen, folder: Path) -> None:
    """The way to the head, and the difference of the clocks."""
    seen.address = own_address()
    seen.interface = next((name for name, own in addresses().items() if own == seen.address), "")
    use_interface(seen.address)
    if seen.node == 0:
        serve_clock(folder, seen.address)
    host, port = await_file(folder / "head", MEET_SECONDS).split()
    seen.round_trip_seconds, seen.clock_seconds = ask_clock(host, int(port))


def serve_clock(folder: Path, address: str) -> None:
    """Answers each connection's bytes with this node's time until the process ends."""
    listener = socket.create_server((address, 0), backlog=1024)
    durable.replace(folder / "head", f"{address} {listener.getsockname()[1]}\n".encode())

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(1):
                connection.sendall(msgspec.json.encode(time.time()).ljust(32))

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def ask_clock(host: str, port: int) -> tuple[float, float]:
    """(round trip, how far this node's clock is ahead of the head's) in seconds, by the fastest round."""
    best = (float("inf"), 0.0)
    with socket.create_connection((host, port), timeout=MEET_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUNDS):
            asked = time.time()
            connection.sendall(b"?")
            answer = b""
            while len(answer) < 32:
                if not (more := connection.recv(32 - len(answer))):
                    raise LaminarError(f"the first node closed the connection to {host}:{port}")
                answer += more
            got = time.time()
            best = min(best, (got - asked, (asked + got) / 2 - float(answer)))
    return best


def storage(seen: Seen, folder: Path) -> None:
    """What run.lock, checkpoints and the journal need of the shared folder: hard links or exclusive files,
    renames over a file, syncs of files and folders."""
    seen.file_system = file_system(folder)
    mine = folder / f"storage{seen.node}"
    mine.mkdir()
    (mine / "a").write_bytes(b"a")
    for what, try_it in (
        ("exclusive creation", lambda: exclusive(mine)),
        ("rename over a file", lambda: (mine / "b").replace(mine / "a")),
        ("sync of a folder", lambda: durable.sync_folder(mine)),
    ):
        try:
            (mine / "b").write_bytes(b"b")
            try_it()
        except OSError as error:
            seen.storage[what] = os.strerror(error.errno or 0)
    started = time.monotonic()
    with open(mine / "synced", "wb") as file:
        for _ in range(_SYNCS):
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    seen.sync_seconds = (time.monotonic() - started) / _SYNCS


def exclusive(folder: Path) -> None:
    """Raises OSError where a file can be created twice."""
    with open(folder / "only", "xb"):
        pass
    with suppress(FileExistsError), open(folder / "only", "xb"):
        raise OSError(0, "a file was created twice")


def broadcast(seen: Seen, folder: Path, nodes: int) -> None:
    """A tensor from node 0 to all, over gloo, as the trainers' control messages go."""
    import torch
    import torch.distributed as dist

    from laminar_hpc.weights.links.meeting import host_store, reach_store

    seconds = timedelta(seconds=MEET_SECONDS)
    if seen.node == 0:
        store, port = host_store(seen.address, MEET_SECONDS)
        durable.replace(folder / "store", f"{seen.address} {port}\n".encode())
    else:
        host, number = await_file(folder / "store", MEET_SECONDS).split()
        store = reach_store(host, int(number), MEET_SECONDS)
    dist.init_process_group("gloo", store=store, rank=seen.node, world_size=nodes, timeout=seconds)
    tensor = torch.zeros(_BYTES // 4)
    dist.broadcast(tensor, 0)  # makes the connections
    started = time.monotonic()
    for _ in range(_BROADCASTS):
        dist.broadcast(tensor, 0)
    dist.barrier()
    if nodes > 1:
        seen.broadcast_bytes_per_second = _BROADCASTS * _BYTES / (time.monotonic() - started)
    dist.destroy_process_group()


def read_seen(path: Path) -> Seen | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Seen)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)
