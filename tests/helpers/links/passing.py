"""A small publication, and its way over one link."""

import threading

import torch

from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.relay.chain import WeightStream, receive_stream, send_stream
from laminar_hpc.weights.stream import decode_header

TENSORS = [
    ("odd", (3, 5), torch.bfloat16),
    ("large", (1001, 77), torch.bfloat16),
    ("none", (0,), torch.float32),
    ("f", (333,), torch.float32),
]


def publication() -> tuple[Manifest, torch.Tensor]:
    manifest = layout(TENSORS, 3, 2)
    data = torch.randint(0, 256, (manifest.data_bytes,), dtype=torch.uint8)
    for entry in manifest.tensors:
        entry.sum_words, entry.sum_indexed = tensor_sums(data[entry.offset : entry.offset + entry.nbytes])
    return manifest, data


def pass_on(link: tuple[Link, Link], sent: WeightStream) -> WeightStream:
    """Sends in another thread; returns what `receive_stream` made of it."""
    sender = threading.Thread(target=send_stream, args=(link[0], sent))
    sender.start()
    try:
        manifest, chunk, _ = decode_header(link[1].receive_bytes())
        received = WeightStream(manifest, torch.zeros(manifest.data_bytes, dtype=torch.uint8), chunk)
        receive_stream(link[1], received)
        return received
    finally:
        sender.join(10)
        assert not sender.is_alive()
