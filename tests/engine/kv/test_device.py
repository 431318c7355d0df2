"""The GPU's part: staging is torch's own indexing; on a GPU the kernels are held against that.
tests/packaging/test_compilers.py compiles them."""

import contextlib
import ctypes
import struct
import subprocess
import sys
import threading
from itertools import product

import msgspec
import pytest
import torch

from helpers.links.fake_device import FakeDevice, FakeStream, used
from helpers.links.pools import bits, make, on_gpu, same, slots_of
from helpers.paths import TESTS
from laminar_hpc import _kv
from laminar_hpc.config.memory import MOVE_BYTES, move_bytes
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.device import MappedKv, Stage, Ticket, share, take_shared
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.inbox import Expected, KvInbox
from laminar_hpc.engine.kv.pool import gather, scatter

CASES = [
    ("bfloat16", 4, 128, 1, 61),
    ("float32", 2, 64, 16, 100),
    ("float16", 1, 5, 64, 65),
    ("bfloat16", 3, 80, 7, 2000),
]


class Kernels:
    """An extension of which CUDA says what it says where a GPU has no kernel."""

    calls = 0

    def device_gather(self, *_: object) -> None:
        self.calls += 1
        raise RuntimeError("CUDA error 209: no kernel image is available for execution on the device")


def test_without_a_kernel_for_the_gpu_torchs_indexing_serves(monkeypatch, caplog):
    """Promise: an extension that was built for other GPUs is asked once, the log says so, and moves go on
    without it."""
    kernels = Kernels()
    monkeypatch.setattr(device, "extension", lambda: kernels)
    monkeypatch.setattr(device, "on_gpu", lambda pool: True)
    device.has_kernels.cache_clear()
    try:
        pool = make(layers=3, seed=1)
        assert not device.can_share(pool) and not device.can_share(pool)
    finally:
        device.has_kernels.cache_clear()
    assert kernels.calls == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert "CUDA error 209" in line and "torch's indexing" in line and "make setup" in line


@pytest.mark.parametrize(("dtype", "heads", "head_dim", "page_size", "tokens"), CASES)
def test_a_stage_stands_for_the_pool(dtype, heads, head_dim, page_size, tokens):
    """Promise: what is gathered from a filled stage is what the pool itself gives, and emptying it writes the
    same rows and no other."""
    pages = -(-tokens // page_size) + 3
    source, target = (make(dtype, 3, heads, head_dim, page_size, pages, seed) for seed in (1, 2))
    ours, theirs = slots_of(tokens, page_size, pages, 3), slots_of(tokens, page_size, pages, 4)
    stage, landed = Stage.of(source, tokens), Stage.of(target, tokens)
    stage.fill(source, ours)
    records = gather(stage.pool, stage.slots, 4096, 1)
    scatter(landed.pool, landed.slots, records, 4096, 1)
    expected = [bits(tensor).clone() for tensor in target.tensors]
    for old, tensor in zip(expected, source.tensors, strict=True):
        old[theirs] = bits(tensor)[ours]
    landed.empty(target, theirs)
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(target.tensors, expected, strict=True))


class FakeKernels:
    """The extension's GPU part over host memory: kernels are enqueued to a fake device, and shared memory is
    mapped in this process."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.shared = device, {}
        self.mapped: list[bytes] = []

    def device_gather(self, *place: int) -> None:
        self.device.current.enqueue(lambda: self._move(True, *place))

    def device_scatter(self, *place: int) -> None:
        self.device.current.enqueue(lambda: self._move(False, *place))

    def _move(self, gathers, planes, count, slots, tokens, stride, row, rows, image, sums, stream) -> None:
        begins = (ctypes.c_uint64 * count).from_address(planes)
        places = (ctypes.c_int64 * tokens).from_address(slots)
        for number in range(count * tokens):
            there = begins[number // tokens] + places[number % tokens] * stride
            ends = (image + number * row, there) if gathers else (there, image + number * row)
            ctypes.memmove(*ends, row)
        found = (ctypes.c_uint64 * (2 * -(-count * tokens // rows))).from_address(sums)
        for chunk, first in enumerate(range(0, count * tokens, rows)):
            size = min(rows, count * tokens - first) * row
            content = torch.frombuffer(
                bytearray(ctypes.string_at(image + first * row, size)), dtype=torch.uint8
            )
            found[2 * chunk : 2 * chunk + 2] = _kv.sums(content.numpy())

    def device_share(self, size: int) -> tuple[int, bytes]:
        memory = torch.zeros(size, dtype=torch.uint8)
        handle = bytes([len(self.shared) + 1]) * 64
        self.shared[handle] = memory
        return memory.data_ptr(), handle

    def device_map(self, handle: bytes) -> int:
        self.mapped.append(handle)
        return self.shared[handle].data_ptr()

    def device_unmap(self, address: int) -> None:
        self.mapped.pop()


@pytest.fixture
def fake(monkeypatch):
    """A GPU with kernels, whose pieces are 6 KB, less than a plane of some moves."""
    found = FakeDevice()
    monkeypatch.setattr(device, "_kept", {})
    monkeypatch.setattr(device, "PIECE_BYTES", 6000)
    monkeypatch.setattr(device, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(device, "extension", lambda: kernels)
    for name in ("on_gpu", "_by_kernels"):
        monkeypatch.setattr(device, name, lambda _: True)
    kernels = FakeKernels(found)
    found.kernels = kernels
    with used(found):
        yield found


@pytest.mark.parametrize("tokens", [1, 40, 61, 200])
def test_any_number_of_moves_takes_the_same_memory(fake, tokens):
    """Promise: a part goes through the GPU's memory in pieces, several layers at once or some tokens of one,
    bit by bit; eight moves at once take as much of it as one, in as many streams."""
    source, target = (make(layers=3, pages=300, seed=seed) for seed in (1, 2))
    ours, theirs = (slots_of(tokens, pages=300, seed=seed) for seed in (3, 4))
    stages = [Stage.of(source, tokens) for _ in range(8)]
    threads = [threading.Thread(target=stage.fill, args=(source, ours)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(bits(stage.image), bits(stages[0].image)) for stage in stages)
    stages[7].empty(target, theirs)
    assert same(source, ours, target, theirs)
    assert sum(memory.nbytes for memory in fake._kept) < 2 * 1.1 * device.PIECE_BYTES
    assert len(fake.made) == 2


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 80), (4, 64), (1, 258), (2, 500), (3, 900)])
@pytest.mark.parametrize("tokens", [1, 7, 61, 300])
def test_pieces_make_up_a_part_and_fit_the_buffers(fake, heads, head_dim, tokens):
    """Promise: whatever a row's size, every row is in one piece, no piece is larger than the buffer, and its
    chunks have no more sums than there is room for."""
    shape = make(layers=3, heads=heads, head_dim=head_dim, pages=1).shape
    found, way = device.pieces(shape, tokens), device._way(torch.device("cpu"), True)
    rows = [
        (plane, token) for p in found for plane in range(p.begin, p.end) for token in range(p.first, p.last)
    ]
    assert sorted(rows) == list(product(range(6), range(tokens)))
    for piece in found:
        count = (piece.end - piece.begin) * (piece.last - piece.first)
        assert count * shape.row_bytes <= device.PIECE_BYTES
        assert 16 * -(-count // shape.rows_per_chunk(device.CHUNK_BYTES)) <= way.scratch.nbytes


@pytest.mark.parametrize("tokens", [40, 200])
def test_shared_pieces_arrive_and_their_memory_stays(fake, tokens):
    """Promise: another process takes piece after piece from the same memory, which is never freed under it; a
    source that has gone on meanwhile makes other sums, and those are refused."""
    source, target = (make(layers=3, pages=300, seed=seed) for seed in (1, 2))
    ours, theirs = (slots_of(tokens, pages=300, seed=seed) for seed in (3, 4))
    mapped = MappedKv(torch.device("cpu"))
    for _ in range(2):
        ends = [take_shared(ticket, mapped, target, theirs) for ticket in share(source, ours)]
        assert len(ends) > 1 and ends == [False] * (len(ends) - 1) + [True]
    assert same(source, ours, target, theirs) and len(fake.kernels.shared) == len(fake.kernels.mapped) == 1
    with contextlib.closing(share(source, ours)) as tickets:
        late = next(tickets)
        next(tickets)
        with pytest.raises(KvRefused, match="its checksum differs"):
            take_shared(late, mapped, target, theirs)
    mapped.close()
    assert not fake.kernels.mapped


@pytest.mark.parametrize("gathers", [True, False])
def test_a_move_waits_for_the_step_in_flight(fake, gathers):
    """Promise: what a step still writes of a token is in what is gathered, and what it writes of a request
    that has ended does not come on top of what is scattered."""
    source, ours = make(layers=1, seed=1), slots_of(20, seed=3)
    stage, steps = Stage.of(source, 20), FakeStream("forward")
    plain, row = torch.zeros_like(stage.image), torch.full_like(source.tensors[0][0], 7.0)
    steps.free.clear()
    steps.enqueue(lambda: source.tensors[0][ours[5]].copy_(row))
    after = device.launched(source, steps)
    work = (stage.fill, (source, ours, after)) if gathers else (device.scatter, (source, ours, plain, after))
    thread = threading.Thread(target=work[0], args=work[1])
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    steps.free.set()
    thread.join(20)
    written = stage.image[0, 5] if gathers else source.tensors[0][ours[5]]
    assert torch.equal(written, row if gathers else torch.zeros_like(row))


def test_what_moves_take_of_a_gpu_is_counted():
    """Promise: the memory check knows of the buffers, where KV caches are moved."""
    config = RunConfig()
    assert MOVE_BYTES == 3 * device.PIECE_BYTES
    config.pipeline.repack = "off"
    assert move_bytes(config) == 0
    config.pipeline.repack = "kv"
    assert move_bytes(config) == MOVE_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "head_dim", "page_size", "tokens"), CASES)
def test_kernels_are_torchs_indexing(dtype, heads, head_dim, page_size, tokens):
    """Promise: gather and scatter are exact, and their sums are those of the host's chunks."""
    assert hasattr(_kv, "device_gather"), (
        "the extension lacks its GPU part: install nvcc, then run make setup again"
    )
    pages = -(-tokens // page_size) + 3
    source, ours = make(dtype, 3, heads, head_dim, page_size, pages, 1), slots_of(tokens, page_size, pages, 3)
    there, stage, plain = on_gpu(source), Stage.of(on_gpu(source), tokens), Stage.of(source, tokens)
    stage.fill(there, ours)
    plain.fill(source, ours)
    assert torch.equal(bits(stage.image), bits(plain.image))
    target = on_gpu(make(dtype, 3, heads, head_dim, page_size, pages, 2))
    stage.empty(target, ours)
    assert all(
        torch.equal(bits(a)[ours.cuda()], bits(b)[ours.cuda()])
        for a, b in zip(there.tensors, target.tensors, strict=True)
    )
    size = source.shape.rows_per_chunk(device.CHUNK_BYTES) * source.shape.row_bytes
    image = plain.image.reshape(-1).view(torch.uint8)
    sums = [
        number
        for start in range(0, len(image), size)
        for number in _kv.sums(image[start : start + size].numpy())
    ]
    found = device._run("device_gather", there, ours, torch.empty_like(plain.image, device="cuda"))
    assert list(struct.unpack(f"<{len(sums)}Q", found)) == sums


CHILD = """
import sys
sys.path.insert(0, {folder!r})
import msgspec, torch
from helpers.links.pools import make, on_gpu, slots_of
from laminar_hpc.engine.kv.device import MappedKv, Ticket, take_shared
pool, slots = on_gpu(make(layers=3, seed=2)), slots_of(40, seed=4)
mapped = MappedKv(torch.device("cuda", 0))
take_shared(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Ticket), mapped, pool, slots)
mapped.close()
source, ours = make(layers=3, seed=1), slots_of(40, seed=3)
pairs = [(a.view(torch.int16), b.cpu().view(torch.int16)) for a, b in zip(source.tensors, pool.tensors)]
print(all(torch.equal(a[ours], b[slots]) for a, b in pairs))
"""


SENDER = """
import sys
sys.path.insert(0, {folder!r})
from helpers.links.pools import make, on_gpu, slots_of
from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.frames import PartHeader
from laminar_hpc.engine.kv.transfer import chunk_bytes, send_part
if {shares!r}:
    device.Stage.of = None
else:
    device.can_share = lambda pool: False
pool, slots, address = on_gpu(make(layers=3, seed=1)), slots_of(40, seed=3), sys.stdin.read()
for first, end in ((0, 30), (30, 40)):
    tokens, size = list(range(first, end)), chunk_bytes(address, "here")
    header = PartHeader.of("model", 3, pool.shape, tokens, size, first, end == 40)
    send_part(address, header, pool, slots[first:end], machine="here", folder="/dev/shm")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [True, False])
def test_a_move_between_gpu_pools_of_two_processes(shares):
    """Promise: both ways of a move, without the host and through it, carry the rows bit by bit."""
    source, ours = make(layers=3, seed=1), slots_of(40, seed=3)
    target, theirs = on_gpu(make(layers=3, seed=2)), slots_of(40, seed=4)
    inbox = KvInbox(Expected("model", 3, target, theirs), "127.0.0.1", "here")
    program = SENDER.format(folder=str(TESTS), shares=shares)
    try:
        subprocess.run(
            [sys.executable, "-c", program], input=inbox.address, text=True, timeout=120, check=True
        )
    finally:
        inbox.close()
    assert inbox.complete
    assert all(
        torch.equal(bits(a)[ours], bits(b).cpu()[theirs])
        for a, b in zip(source.tensors, target.tensors, strict=True)
    )


@pytest.mark.gpu
def test_another_process_takes_what_is_shared():
    """Promise: CUDA IPC carries the rows between processes bit by bit, and a wrong sum is refused in one
    line."""
    source, slots = on_gpu(make(layers=3, seed=1)), slots_of(40, seed=3)
    with contextlib.closing(share(source, slots)) as tickets:
        shared = next(tickets)
        ticket = msgspec.msgpack.encode(shared).hex()
        program = CHILD.format(folder=str(TESTS))
        done = subprocess.run(
            [sys.executable, "-c", program, ticket], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout == "True\n"
        wrong = Ticket(shared.handle, 39, 0, shared.sums)
        with pytest.raises(KvRefused, match="40 slots were reserved"):
            take_shared(wrong, MappedKv(torch.device("cuda", 0)), source, slots)
