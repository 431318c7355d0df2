"""The GPU's part: staging is torch's own indexing; on a GPU the kernels are held against that.
tests/packaging/test_compilers.py compiles them."""

import struct
import subprocess
import sys

import msgspec
import pytest
import torch

from helpers.links.pools import bits, make, on_gpu, slots_of
from helpers.paths import TESTS
from laminar_hpc import _kv
from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.device import SharedKv, Stage, Ticket, take_shared
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
from laminar_hpc.engine.kv.device import Ticket, take_shared
pool, slots = on_gpu(make(layers=3, seed=2)), slots_of(40, seed=4)
take_shared(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Ticket), pool, slots)
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
    with SharedKv(source, slots) as shared:
        ticket = msgspec.msgpack.encode(shared.ticket).hex()
        program = CHILD.format(folder=str(TESTS))
        done = subprocess.run(
            [sys.executable, "-c", program, ticket], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout == "True\n"
        wrong = Ticket(shared.ticket.handle, 39, shared.ticket.sums)
        with pytest.raises(KvRefused, match="40 slots were reserved"):
            take_shared(wrong, source, slots)
