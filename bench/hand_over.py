"""Weights of a 7B's shape from a GPU to a relay in another process and from its slot back to a GPU, and a
relay that is killed meanwhile.

    python bench/hand_over.py --json hand_over.json       Qwen2.5-7B in bf16, 15.2 GB, through host memory
    python bench/hand_over.py --relay-device cuda:1 --transport nccl     between two GPUs, as between machines
    python bench/hand_over.py --device cpu --layers 1     the same way without a GPU, to try it

`make bench-gpu` does the same as the first.

Link, stream, slot and load are those of a run; sums are compared at either end. In the second part the relay
is killed when a third has left: the sender must leave its link, as it would when the controller proposes
another one, and hand over all of it to the next relay.

Stages of a hand-over, which overlap: the copies from the GPU to host memory, the sender's waits for the
relay, and the relay's copies into its slot, which take the sums on the way (`--relay-threads`).

Figures: `pull_over_pinned_copy`, the load's rate over that of a plain copy of as many bytes from pinned
memory (goal: at least 0.8); `hand_over_gb_per_second`; `leave_seconds`, from the kill until the sender has
left the link; `next_relay_seconds`, until the next one has all of it.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import torch

from laminar_hpc.engine.sglang.plugin.load_slot import load_slot
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.links.links import Link, Posted
from laminar_hpc.weights.links.meeting import LinkBroken, host_store, reach_store
from laminar_hpc.weights.links.streams import settle, streams_of
from laminar_hpc.weights.links.window import Window
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.relay.arriving import ArrivingSums
from laminar_hpc.weights.relay.chain import WeightStream, receive_stream
from laminar_hpc.weights.slots import SlotWriter
from laminar_hpc.weights.stream import decode_header, encode_header, encode_sums

HOST, SECONDS, RUN_ID = "127.0.0.1", 60.0, "hand-over"
HIDDEN, FEED_FORWARD, KV, VOCABULARY = 3584, 18944, 512, 152064  # Qwen2.5-7B
CHUNK = 64 << 20


def tensors(layers: int, vocabulary: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Names and shapes of the model."""
    of_layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.q_proj.bias": (HIDDEN,),
        "self_attn.k_proj.weight": (KV, HIDDEN),
        "self_attn.k_proj.bias": (KV,),
        "self_attn.v_proj.weight": (KV, HIDDEN),
        "self_attn.v_proj.bias": (KV,),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    names = [
        (f"model.layers.{number}.{name}", shape)
        for number in range(layers)
        for name, shape in of_layer.items()
    ]
    outer = [
        ("model.embed_tokens.weight", (vocabulary, HIDDEN)),
        ("lm_head.weight", (vocabulary, HIDDEN)),
        ("model.norm.weight", (HIDDEN,)),
    ]
    return [(name, shape, torch.bfloat16) for name, shape in [*names, *outer]]


def relay(index: int, device: str, folder: Path, threads: int, pipe: Connection) -> None:
    """Takes ports of stores; receives what comes over the link into a slot, and says where it is and how long
    it has copied."""
    die_with_parent()
    torch.set_num_threads(threads)
    copied, put = [0.0], ArrivingSums.put

    def timed(*arguments: Any) -> None:
        began = time.monotonic()
        put(*arguments)
        copied[0] += time.monotonic() - began

    ArrivingSums.put = timed
    writer = SlotWriter(str(folder), f"{RUN_ID}{index}", 1, folder)
    link = Link(
        reach_store(HOST, pipe.recv(), SECONDS),
        1,
        0,
        False,
        "the trainer",
        HOST,
        torch.device(device),
        SECONDS,
        SECONDS,
    )
    while True:
        manifest, chunk, _ = decode_header(link.receive_bytes(idle_seconds=SECONDS * 10))
        stream = WeightStream(manifest, torch.from_numpy(writer.begin(manifest)), chunk)
        copied[0] = 0.0
        receive_stream(link, stream)
        pipe.send((writer.commit(manifest), copied[0]))


def start(
    index: int, device: torch.device, options: argparse.Namespace, folder: Path, window: Window
) -> tuple[multiprocessing.Process, Connection, Link]:
    """A relay, and the sender's link to it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=relay, args=(index, options.relay_device or str(device), folder, options.relay_threads, theirs)
    )
    process.start()
    theirs.close()
    store, port = host_store(HOST, SECONDS)
    ours.send(port)
    place = (store, 1, 0, True, f"relay {index}", HOST, device, SECONDS, SECONDS)
    return process, ours, Link(*place, leave=True, window=window, transport=options.transport)


def send(
    link: Link,
    manifest: Manifest,
    image: torch.Tensor,
    window: Window,
    killer: threading.Thread | None = None,
) -> tuple[float, float]:
    """The whole stream, as a lane's sender does it; `killer` is started when a third of it has left. Returns
    the seconds of copies to the window, and of waits for the relay."""
    copying = waiting = 0.0
    streams, leaving = streams_of(image.device), deque[tuple[Posted, torch.Tensor]]()
    link.send_bytes(encode_header(manifest, CHUNK))
    for number, first in enumerate(range(0, len(image), CHUNK)):
        if killer is not None and 3 * first >= len(image) and killer.ident is None:
            killer.start()
        began = time.monotonic()
        if len(leaving) == 2:
            link.finish(*leaving.popleft())
        free = time.monotonic()
        waiting += free - began
        part = image[first : first + CHUNK]
        if link.device_end is None:
            begin = number % 2 * CHUNK
            streams.copy(window.tensor[begin : begin + len(part)], part)
            settle(streams, SECONDS, "a copy to host memory")
            part = window.tensor[begin : begin + len(part)]
            copying += time.monotonic() - free
        leaving.append((link.give(part), part))
    while leaving:
        link.finish(*leaving.popleft())
    link.send_bytes(encode_sums((entry.sum_words, entry.sum_indexed) for entry in manifest.tensors))
    return copying, waiting


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - began


def pull(
    manifest: Manifest, slot: Path, device: torch.device, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of verified loads of the slot, and of plain copies of as many bytes from pinned memory beside
    them."""
    live = torch.zeros(manifest.data_bytes, dtype=torch.uint8, device=device)
    pinned = torch.zeros(manifest.data_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    held = [
        LocalSlice(e.name, tuple(e.shape), 0, 0, e.shape[0], part.view(torch.bfloat16).view(e.shape))
        for e in manifest.tensors
        for part in (live[e.offset : e.offset + e.nbytes],)
    ]
    loads, copies, sums = [], [], {}
    for _ in range(repeats + 1):
        loads.append(seconds(device, lambda: sums.update(load_slot(held, slot))))
        if any(sums[entry.name] != (entry.sum_words, entry.sum_indexed) for entry in manifest.tensors):
            raise SystemExit("what was loaded has other sums than what was sent")
        copies.append(seconds(device, lambda: live.copy_(pinned, non_blocking=True)))
    return loads[1:], copies[1:]


def killed_meanwhile(
    process: multiprocessing.Process, link: Link, manifest: Manifest, image: torch.Tensor, window: Window
) -> float:
    """Seconds from the relay's death until the sender has left the link."""
    killed = []

    def kill() -> None:
        process.kill()
        killed.append(time.monotonic())
        link.close()

    try:
        send(link, manifest, image, window, threading.Thread(target=kill))
    except LinkBroken as broke:
        print(f"  the sender left the link: {broke}", flush=True)
        return time.monotonic() - killed[0]
    raise SystemExit("the relay was killed, and the sender did not notice")


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--device", default="cuda:0", help="default cuda:0")
    options.add_argument("--relay-device", default="", help="default: the same")
    options.add_argument("--transport", choices=("auto", "nccl", "host"), default="auto", help="default auto")
    options.add_argument("--relay-threads", type=int, default=8, help="default 8")
    options.add_argument("--layers", type=int, default=28, help="default 28")
    options.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"default {VOCABULARY}")
    options = options.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "bench/hand_over.py needs an NVIDIA GPU, and torch sees none here; "
            "--device cpu tries the same way over gloo"
        )
    manifest = layout(tensors(options.layers, options.vocabulary), 0, 0)
    gigabytes = manifest.data_bytes / 1e9
    image = (
        torch.empty(manifest.data_bytes // 8, dtype=torch.int64, device=device).random_().view(torch.uint8)
    )
    for entry in manifest.tensors:
        entry.sum_words, entry.sum_indexed = tensor_sums(image[entry.offset : entry.offset + entry.nbytes])
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir="/dev/shm") as folder:
        window = Window(2 * CHUNK)
        streams_of(device).pin(window.tensor)
        process, pipe, link = start(0, device, options, Path(folder), window)
        print(f"  transport: {link.transport}", flush=True)
        handed, stages = [], []
        for _ in range(options.repeats + 1):
            began = time.monotonic()
            copying, waiting = send(link, manifest, image, window)
            slot, copied = pipe.recv()
            handed.append(time.monotonic() - began)
            stages.append((copying, waiting, copied))
        loads, copies = pull(manifest, slot, device, options.repeats)
        left = killed_meanwhile(process, link, manifest, image, window)
        began = time.monotonic()
        other, pipe, again = start(1, device, options, Path(folder), window)
        send(again, manifest, image, window)
        pipe.recv()
        recovered = time.monotonic() - began
        for each in (process, other):
            each.kill()
            each.join(10)
    of_stages = [common.median(list(each)) for each in zip(*stages[1:], strict=True)]
    times = {
        "hand-over": common.median(handed[1:]),
        "its copies to host memory": of_stages[0],
        "its copies into the slot, with sums": of_stages[2],
        "pull, verified": common.median(loads),
        "copy from pinned memory": common.median(copies),
    }
    rows = [{"what": what, "seconds": took, "GB/s": gigabytes / took} for what, took in times.items() if took]
    rows += [
        {"what": "the sender waits for the relay", "seconds": of_stages[1]},
        {"what": "from the kill until the link is left", "seconds": left},
        {"what": "a new relay's process, link and all bytes", "seconds": recovered},
    ]
    figures = {
        "hand_over_gb_per_second": gigabytes / times["hand-over"],
        "pull_over_pinned_copy": common.median(
            [copy / load for copy, load in zip(copies, loads, strict=True)]
        ),
        "leave_seconds": left,
        "next_relay_seconds": recovered,
    }
    common.finish(options, figures, rows, ("what", "seconds", "GB/s"))
    sys.stdout.flush()
    os._exit(0)  # a thread that waits in gloo must not wake while the interpreter ends


if __name__ == "__main__":
    main()
