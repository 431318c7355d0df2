"""Two-member groups of a membership epoch: one trainer rank and one relay, or one relay and the next.

Only two members, so that no cycle of waits can form; a dead peer breaks its own link, never the process. The epoch's leader hosts the
store on the run's own address (loopback unless configured); gloo binds to the same address, NCCL where the tensors are on a GPU.
"""

import re
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError


class LinkBroken(LaminarError):
    """The other end of a link has gone or did not answer in time."""


def own_address(host: str) -> str:
    """The IP address at which this machine is reached by the others: loopback for a run on one machine, else the route to `host`."""
    target = socket.gethostbyname(host)
    if target.startswith("127."):
        return target
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # a datagram socket picks the route and sends nothing
        probe.connect((target, 9))
        return probe.getsockname()[0]


def host_store(address: str, seconds: float) -> tuple[dist.TCPStore, int]:
    """A store that listens at `address` only, and its port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(256)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=timedelta(seconds=seconds)
    )
    return store, port


def reach_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError, ConnectionError) as error:
        raise LinkBroken(f"the store of this epoch at {host}:{port} was not reached within {seconds:.0f} s ({error})") from None


class Link:
    """One direction: the sender has rank 0, the receiver rank 1. Every operation is bounded by `seconds`."""

    def __init__(
        self, store: dist.Store, epoch: int, number: int, sender: bool, peer: str, address: str, device: torch.device, seconds: float
    ) -> None:
        self.peer, self.seconds, self.device = peer, seconds, device
        self._sender = sender
        self.bytes_sent = 0  # of all frames and tensors
        prefix = dist.PrefixStore(f"laminar/{epoch}/{number}", store)
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=seconds)
                self._group = dist.ProcessGroupNCCL(prefix, 0 if sender else 1, 2, options)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = timedelta(seconds=seconds)
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                self._group = dist.ProcessGroupGloo(prefix, 0 if sender else 1, 2, options)
        except (dist.DistError, RuntimeError) as error:
            raise LinkBroken(f"no link to {peer} within {seconds:.0f} s: it did not join epoch {epoch} ({_first_line(error)})") from None

    def _begin(self, tensor: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.bytes_sent += tensor.nbytes if self._sender else 0
        return self._group.broadcast([tensor], options)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            self._begin(tensor).wait()
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except (dist.DistError, RuntimeError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> LinkBroken:
        return LinkBroken(f"the link to {self.peer} broke ({_first_line(error)})")

    def begin_send(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Sends behind the caller's back; returns what tells whether it is done. `tensor` must stay as it is until then."""
        try:
            work = self._begin(tensor)
        except (dist.DistError, RuntimeError) as error:
            raise self._broken(error) from None

        def done() -> bool:
            try:
                return work.is_completed() and work.wait()
            except (dist.DistError, RuntimeError) as error:
                raise self._broken(error) from None

        return done

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous tensor on this link's device."""
        self._broadcast(tensor)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Receives into a contiguous tensor on this link's device."""
        self._broadcast(tensor)
        return tensor

    def send_bytes(self, content: bytes) -> None:
        """A length, then the bytes."""
        self._broadcast(torch.tensor([len(content)], dtype=torch.int64, device=self.device))
        if content:
            self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device))

    def receive_bytes(self, most: int = 1 << 28) -> bytes:
        """What `send_bytes` sent; a length beyond `most` is refused."""
        length = int(self.receive(torch.zeros(1, dtype=torch.int64, device=self.device)).item())
        if not 0 <= length <= most:
            raise LinkBroken(f"{self.peer} announced {length} bytes; at most {most} are taken")
        return bytes(self.receive(torch.zeros(length, dtype=torch.uint8, device=self.device)).cpu().numpy()) if length else b""


def _first_line(error: Exception) -> str:
    """Of torch's message, without the place in gloo's source that it begins with."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0])[:120]
