"""One part of a move, from a source's pool to a destination's inbox: between GPUs of one machine without the
host, through shared memory where both see the same, else over TCP.

    inbox = Inbox(...)                                  destination: listens, in a thread of its own;
                                                        inbox.address goes to the source
    send_part(inbox.address, header, pool, slots, ...)  source: returns when all of the part is there and
                                                        checked, else raises KvRefused

Both sides first meet over TCP: a ROUTER here, DEALERs there, with CURVE keys made for this one move (ZeroMQ's
authenticated encryption, as between the roles), of which the address holds the source's pair. So whoever
holds the address may send, and nobody else.

    source -> "part", header        "go" or "no", reason <- destination
    source -> "gpu", ticket         a piece of rows that it shares on its GPU; "more" for the next one, "host"
                                    if it cannot be mapped: then the source goes on with one of the next two
    source -> "shm", path           the file of shm.py
    source -> "rows", record        for each chunk, over the streams in turn; a record is that of frames.py
                                    "ok" or "no", reason <- destination
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import torch
import zmq

from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import PartHeader, Shape, encode_header
from laminar_hpc.engine.kv.native import extension
from laminar_hpc.engine.kv.pool import NATIVE_PLAN, Pool, aligned
from laminar_hpc.engine.kv.shm import CHUNK_BYTES, WAIT_SECONDS, ShmOffer
from laminar_hpc.weights.links.streams import StreamEvent

log = logging.getLogger(__name__)
T = TypeVar("T")
# TCP connections of a move; one seldom fills a fast network, and each is encrypted by another thread
STREAMS = 4
TCP_CHUNK_BYTES = 1 << 19  # a message's overhead is small beside it
QUEUED = 8  # chunks on their way per stream: bounds the memory of a move


class KvAddress(msgspec.Struct, frozen=True):
    """What an address says."""

    host: str
    port: int
    machine: str  # as of cluster.processes.machine_name: whose shared memory the destination sees
    gpu: bool  # rows that another process shares on a GPU can be taken
    server_public: str
    client_public: str
    client_secret: str


def decode_address(address: str) -> KvAddress:
    """What an engine's address says. Raises KvRefused for any other text."""
    return _decoded(address, KvAddress)


def of_all_ranks(addresses: Sequence[str]) -> str:
    """An engine's address: those of its tensor-parallel ranks' inboxes, in the order of the ranks."""
    return msgspec.json.encode([msgspec.Raw(address.encode()) for address in addresses]).decode()


def of_rank(address: str, rank: int, ranks: int) -> str:
    """The inbox that rank `rank` of a source with `ranks` sends to: that of the same rank. Raises KvRefused
    where the destination is divided in another way."""
    inboxes = _decoded(address, list[msgspec.Raw])
    if len(inboxes) != ranks:
        raise KvRefused(
            f"KV move refused: the destination has {len(inboxes)} tensor-parallel ranks, this engine "
            f"{ranks}; give all replicas the same rollout.tensor_parallel"
        )
    return bytes(inboxes[rank]).decode()


def _decoded(address: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(address, type=kind)
    except msgspec.DecodeError as error:
        raise KvRefused(
            f"KV move refused: {address[:40]!r} is not an address of a reserved engine ({error})"
        ) from None


def chunk_bytes(address: str, machine: str) -> int:
    """What a part's header must name for this way."""
    return CHUNK_BYTES if decode_address(address).machine == machine else TCP_CHUNK_BYTES


def send_part(
    address: str,
    header: PartHeader,
    pool: Pool,
    slots: torch.Tensor,
    *,
    machine: str,
    folder: str,
    threads: int = 1,
    seconds: float = WAIT_SECONDS,
    after: StreamEvent | None = None,
) -> None:
    """Sends the KV of `slots` (int64 [tokens], on the CPU), of a GPU once `after` is reached. `folder` is
    shared memory's, used where the destination's machine is `machine`.

    Blocks; every wait for the destination ends after `seconds`. Raises KvRefused for whatever goes wrong.
    """
    place = decode_address(address)
    local = place.machine == machine
    with _connected(place, 1 if local else STREAMS, seconds) as streams:
        streams[0].send_multipart([b"part", encode_header(header)])
        _answer(streams[0], place, seconds, b"go")
        if (
            local
            and place.gpu
            and device.can_share(pool)
            and _share(streams[0], pool, slots, place, seconds, after)
        ):
            return
        if device.on_gpu(pool):
            stage = device.Stage.of(pool, len(slots))
            stage.fill(pool, slots, after)
            pool, slots = stage.pool, stage.slots
        if local:
            _offer(streams[0], header, pool, slots, folder, threads, seconds)
        else:
            plan = pool.plan(slots, header.chunk_bytes, threads, distinct=False, streaming=False)
            _stream(streams, plan, pool.shape, header, place, seconds)
        _answer(streams[0], place, seconds, b"ok")


def send_records(
    address: str,
    parts: Sequence[tuple[PartHeader, Sequence[bytes | bytearray]]],
    seconds: float = WAIT_SECONDS,
) -> None:
    """Sends parts whose chunk records are there already, as they once came over TCP. Blocks and raises as
    `send_part`."""
    place = decode_address(address)
    with _connected(place, STREAMS, seconds) as streams:
        for header, records in parts:
            streams[0].send_multipart([b"part", encode_header(header)])
            _answer(streams[0], place, seconds, b"go")
            for number, record in enumerate(records):
                streams[number % STREAMS].send_multipart([b"rows", record])
                if streams[0].poll(0):  # an early "no"
                    break
            _answer(streams[0], place, seconds, b"ok")


@contextlib.contextmanager
def _connected(place: KvAddress, count: int, seconds: float) -> Iterator[list[zmq.Socket]]:
    """So many connections to a destination; one that takes nothing for `seconds` is said by KvRefused."""
    with zmq.Context(io_threads=count) as context:
        streams = [_connect(context, place, seconds) for _ in range(count)]
        try:
            yield streams
        except zmq.Again:
            raise KvRefused(
                f"KV move failed: the destination at {place.host}:{place.port} took nothing for {seconds:g} s"
            ) from None
        finally:
            for stream in streams:
                stream.close(0)


def _connect(context: zmq.Context, place: KvAddress, seconds: float) -> zmq.Socket:
    stream = context.socket(zmq.DEALER)
    stream.curve_serverkey = place.server_public.encode()
    stream.curve_publickey = place.client_public.encode()
    stream.curve_secretkey = place.client_secret.encode()
    stream.sndtimeo = int(seconds * 1000)
    stream.sndhwm = QUEUED
    stream.connect(f"tcp://{place.host}:{place.port}")
    return stream


def _answer(stream: zmq.Socket, place: KvAddress, seconds: float, *wanted: bytes) -> bytes:
    if not stream.poll(int(seconds * 1000)):
        raise KvRefused(
            f"KV move failed: the destination at {place.host}:{place.port} said nothing for {seconds:g} s"
        )
    kind, *rest = stream.recv_multipart()
    if kind not in wanted:
        raise KvRefused(
            rest[0].decode(errors="replace")
            if rest
            else "KV move failed: the destination speaks another protocol"
        )
    return kind


def _share(
    stream: zmq.Socket,
    pool: Pool,
    slots: torch.Tensor,
    place: KvAddress,
    seconds: float,
    after: StreamEvent | None,
) -> bool:
    """Whether the destination has taken the rows from this GPU. False where CUDA cannot, at either end."""
    try:
        with contextlib.closing(device.share(pool, slots, after)) as tickets:
            for ticket in tickets:
                stream.send_multipart([b"gpu", msgspec.msgpack.encode(ticket)])
                answer = _answer(stream, place, seconds, b"more", b"ok", b"host")
                if answer != b"more":
                    return answer == b"ok"
    except RuntimeError as error:
        log.warning("KV goes through the host: %s", error)
    return False


def _offer(
    stream: zmq.Socket,
    header: PartHeader,
    pool: Pool,
    slots: torch.Tensor,
    folder: str,
    threads: int,
    seconds: float,
) -> None:
    with ShmOffer(header, folder, seconds=seconds) as offer:
        stream.send_multipart([b"shm", str(offer.path).encode()])
        try:
            offer.send(pool, slots, threads)
        except KvRefused as error:
            if stream.poll(1000):  # the destination says why
                return
            raise error


def _stream(
    streams: list[zmq.Socket],
    plan: NATIVE_PLAN,
    shape: Shape,
    header: PartHeader,
    place: KvAddress,
    seconds: float,
) -> None:
    record = aligned(shape.record_bytes(header.chunk_bytes)).numpy()
    start = time.monotonic()
    for number in range(shape.chunks(header.tokens, header.chunk_bytes)):
        extension().pack_chunk(*plan, number, record)
        length = 64 + int.from_bytes(record[8:16].tobytes(), "little")
        streams[number % len(streams)].send_multipart([b"rows", record.data[:length]])
        if streams[0].poll(0):  # an early "no"
            return
        if time.monotonic() - start > 10 * seconds:
            raise KvRefused(
                "KV move failed: it took the destination at "
                f"{place.host}:{place.port} more than {10 * seconds:g} s"
            )
