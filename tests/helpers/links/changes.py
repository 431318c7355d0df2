"""A publication as changes to the one before, and its way over one link."""

import contextlib
import threading

import torch

from laminar_hpc.weights.delta import encode
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import LinkBroken
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.relay.chain import Changes, WeightStream, receive_stream, send_stream
from laminar_hpc.weights.stream import decode_header

CHUNK = 1 << 16
TENSORS = [
    ("a", (333, 77), "bfloat16"),
    ("b", (5,), "bfloat16"),
    ("c", (100_000,), "bfloat16"),
]  # chunks end inside tensors


def publication(density: float) -> tuple[torch.Tensor, WeightStream]:
    """The bytes of weight id 4, and id 5 as changes to it, complete at a relay that has received it."""
    generator = torch.Generator().manual_seed(0)
    manifest = layout(TENSORS, 5, 2)
    old = torch.randint(0, 256, (manifest.data_bytes,), dtype=torch.uint8, generator=generator)
    new = old.clone()
    new[torch.rand(new.shape, generator=generator) < density] ^= 1
    new[:CHUNK] = old[:CHUNK]  # a chunk in which nothing changes
    new[CHUNK : 2 * CHUNK] ^= 255  # and one in which all does
    for entry in manifest.tensors:
        entry.sum_words, entry.sum_indexed = tensor_sums(new[entry.offset : entry.offset + entry.nbytes])
    stream = WeightStream(manifest, new, CHUNK, complete=True)
    frames = {
        n: encode(new[at : at + CHUNK].clone(), old[at : at + CHUNK].clone(), 2)
        for n, at in enumerate(range(0, len(new), CHUNK))
    }
    stream.changes = Changes(
        4, old, {number: frame for number, frame in frames.items() if int(frame.head[0])}
    )
    return old, stream


def across(
    link: tuple[Link, Link], sent: WeightStream, old: torch.Tensor
) -> tuple[Manifest, int, WeightStream]:
    """What the peer makes of it: (manifest, base id, stream)."""
    upstream, downstream = link
    sender = threading.Thread(target=_send, args=(upstream, sent))
    sender.start()
    manifest, chunk, base_id = decode_header(downstream.receive_bytes())
    received = WeightStream(manifest, torch.zeros_like(old), chunk)
    received.passed_on = 1
    if base_id is not None:
        received.changes = Changes(base_id, old)
    try:
        receive_stream(downstream, received)
    finally:
        if not received.complete:
            downstream.close()
        sender.join(10)
    return manifest, base_id, received


def _send(link: Link, stream: WeightStream) -> None:
    with contextlib.suppress(LinkBroken):
        send_stream(link, stream)
