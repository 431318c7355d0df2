"""Figures of bench/anywhere.py on weights for relays at other places.

`bytes_over_full` (goal: at most 0.1): what crosses the link to a place for a publication over the bytes of
its weights, on the shape of Qwen2.5-0.5B: bfloat16 weights that follow float32 ones, which AdamW moves at a
learning rate of 1e-6 under random gradients. Through a real gate and a real link on loopback. The mean is
over the publications behind the first one, which is a full copy; `bytes_over_full_with_first` counts it too.

`megabytes_per_second` (goal: at least 200 on two idle cores): a full copy over loopback, encrypted, from the
gate's process to the relay's, until it is in memory; `cpu_seconds_per_gigabyte` of both together.

`wide_area_seconds`: from a publication to the last sum at a relay at another place, 20 MB of float32 weights
of which one in a hundred changes, over 50 Mbit/s, 80 ms and 1% loss (wide_area.py; root). `full` is the first
copy. The real controller, publisher and relays (chain_roles.py).
"""

import argparse
import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import wide_area
from chain_roles import START_SECONDS, ChainRun
from shapes import shape, tensors

from laminar_hpc.line.messages.places import GateAddress
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.places.far_link import FarLink
from laminar_hpc.weights.places.gate import Gate
from laminar_hpc.weights.relay.chain import Changes, WeightStream, receive_stream
from laminar_hpc.weights.slots import SlotReader, SlotWriter
from laminar_hpc.weights.stream import decode_header

LEARNING_RATE, BETAS, EPSILON = 1e-6, (0.9, 0.999), 1e-8
SPREAD = 0.02  # standard deviation of the weights
MBIT, MILLISECONDS, LOSS = 50, 80, 0.01


# ---- a gate and a link -------------------------------------------------------------------------------------


class GateSlots:
    """Slots with a gate before them."""

    def __init__(self, folder: Path, tensors: list) -> None:
        self._tensors = tensors
        self._writer = SlotWriter(str(folder), "bench", 2, folder)
        self.gate = Gate("127.0.0.1", "", SlotReader(str(folder), "bench"), self._failed)
        self._next_id = 0

    def _failed(self, error: Exception) -> None:
        raise error

    def publish(self, fill: Callable[[torch.Tensor, Manifest], None]) -> None:
        """`fill(data, manifest)` writes the bytes."""
        manifest = layout(self._tensors, self._next_id, self._next_id)
        data = torch.from_numpy(self._writer.begin(manifest))[: manifest.data_bytes]
        fill(data, manifest)
        for entry in manifest.tensors:
            part = data[entry.offset : entry.offset + entry.nbytes]
            entry.sum_words, entry.sum_indexed = tensor_sums(part)
        self._writer.commit(manifest)
        self._next_id += 1

    def close(self) -> None:
        self.gate.close()
        self._writer.close()


class FarEnd:
    """A relay's end: the weights that it holds, in memory."""

    def __init__(self, address: GateAddress) -> None:
        self._id: int | None = None
        self._data = torch.empty(0, dtype=torch.uint8)
        self._link = FarLink(address, 1, "the gate", "bench", lambda: self._id)

    def pull(self) -> tuple[float, float]:
        """The next publication, with its sums checked: (bytes on the wire over its own, seconds from its
        first byte on)."""
        manifest, chunk, base_id = decode_header(self._link.receive_bytes(idle_seconds=600))
        began = time.monotonic()
        stream = WeightStream(manifest, torch.empty(manifest.data_bytes, dtype=torch.uint8), chunk)
        if base_id is not None:
            stream.changes = Changes(base_id, self._data)
        receive_stream(self._link, stream)
        self._id, self._data = manifest.weight_id, stream.data
        assert self._link.wire_bytes is not None
        return self._link.wire_bytes / manifest.data_bytes, time.monotonic() - began

    def close(self) -> None:
        self._link.close()


# ---- bytes_over_full ---------------------------------------------------------------------------------------


class AdamWeights:
    """float32 weights that AdamW moves under random gradients, and what is served of them."""

    def __init__(self, elements: int) -> None:
        self._weights = torch.randn(elements) * SPREAD
        self._mean = torch.zeros(elements)
        self._square = torch.zeros(elements)
        self._step = 0

    def update(self) -> None:
        self._step += 1
        first, second = BETAS
        gradient = torch.randn_like(self._weights)
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        denominator = (self._square / (1 - second**self._step)).sqrt_().add_(EPSILON)
        self._weights.addcdiv_(self._mean, denominator, value=-LEARNING_RATE / (1 - first**self._step))

    def write(self, data: torch.Tensor, _: Manifest) -> None:
        data.view(torch.bfloat16).copy_(self._weights)


def bytes_over_full(chosen: argparse.Namespace) -> tuple[dict, list[dict]]:
    """`chosen.steps` publications behind the first."""
    model = list(tensors(shape("0.5b", chosen.layers)))
    weights = AdamWeights(layout(model, 0, 0).data_bytes // 2)
    rows = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir="/dev/shm") as folder:
        home = GateSlots(Path(folder), model)
        far = FarEnd(home.gate.address)
        for number in range(chosen.steps + 1):
            if number:
                weights.update()
            home.publish(weights.write)
            share, seconds = far.pull()
            rows.append({"publication": number, "over full": share, "seconds": seconds})
            print(f"  publication {number}: {share:.4f} of its bytes", file=sys.stderr, flush=True)
        far.close()
        home.close()
    shares = [row["over full"] for row in rows]
    return {
        "bytes_over_full": statistics.fmean(shares[1:]),
        "bytes_over_full_largest": max(shares[1:]),
        "bytes_over_full_with_first": statistics.fmean(shares),
    }, rows


# ---- megabytes_per_second ----------------------------------------------------------------------------------


def _serve(folder: str, size: int, line: Connection) -> None:
    die_with_parent()
    home = GateSlots(Path(folder), [("w", (size // 2,), "bfloat16")])
    home.publish(lambda data, _: data.view(torch.int32).random_())
    before = time.process_time()
    line.send(home.gate.address)
    line.recv()
    line.send(time.process_time() - before)
    line.recv()
    home.close()


def megabytes_per_second(chosen: argparse.Namespace) -> tuple[dict, list[dict]]:
    """Full copies; the quickest counts."""
    size, rows = chosen.megabytes * 1_000_000, []
    for _ in range(3):
        with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir="/dev/shm") as folder:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, size, theirs))
            process.start()
            far = FarEnd(ours.recv())
            before = time.process_time()
            _, seconds = far.pull()
            cpu = time.process_time() - before
            ours.send("how much time of the CPU?")
            cpu += ours.recv()
            ours.send("end")
            far.close()
            process.join(30)
        rows.append({"seconds": seconds, "cpu seconds per GB": cpu / size * 1e9})
    return {
        "megabytes_per_second": size / 1e6 / min(row["seconds"] for row in rows),
        "cpu_seconds_per_gigabyte": min(row["cpu seconds per GB"] for row in rows),
    }, rows


# ---- wide_area_seconds -------------------------------------------------------------------------------------


def wide_area_seconds(chosen: argparse.Namespace) -> tuple[dict, list[dict]]:
    """Medians of `chosen.steps` publications of changes; none where there is no such line."""
    if why := wide_area.missing():
        print(f"  no wide area here: {why}", file=sys.stderr)
        return {}, []
    with (
        tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder,
        wide_area.WideArea(MBIT, MILLISECONDS, LOSS) as line,
    ):
        words = "relay.delta=auto", f"cluster.join_timeout_seconds={START_SECONDS}"
        where = functools.partial(_namespace, line)
        run = ChainRun(Path(folder), 1, 20_000_000, *words, host=line.address(0), namespace=where)
        try:
            run.publish()
            run.wait([0], run.step, START_SECONDS)
            began = time.monotonic()
            run.start_far_relay(1, "bench")
            run.until(lambda: run.held(1) >= 0, "the first copy is late", START_SECONDS)
            seconds = [time.monotonic() - began]
            for _ in range(chosen.steps):
                began = time.monotonic()
                run.publish()
                run.wait([1], run.step, START_SECONDS)
                seconds.append(time.monotonic() - began)
        finally:
            run.close()
    rows = [{"publication": number, "seconds": each} for number, each in enumerate(seconds)]
    figures = {"wide_area_seconds": statistics.median(seconds[1:]), "wide_area_seconds_full": seconds[0]}
    return figures, rows


def _namespace(line: wide_area.WideArea, who: object) -> str:
    return line.namespace(1 if who == 1 else 0)
