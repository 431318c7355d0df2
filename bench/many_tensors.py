"""What a publication of very many tensors costs beside its bytes: for each process that has a part in it.

    python bench/many_tensors.py [--json PATH]

The names are Qwen3-30B-A3B's (18,867 tensors), the shapes are small: what is counted does not depend on
them. CPU seconds, the least of `--repeats` rounds.

Sender: the layout, what goes before and behind the chunks. Relay: the same, read and written again, the sums
of each tensor as it arrives, a slot's manifest and header. Rollout: the slot found and leased, its file,
names, shapes and sums checked. Engine: what it copies and adds up for each tensor. Controller: the real one
over a store on the disk, its turns from the request for an id to the last replica's report, with MEMBERS; no
message of them names a tensor. Goal: `relay_cpu_seconds` and `controller_cpu_seconds` together below 1.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import common
import torch
from control_loop import WORKING, Hub, controller_of

from laminar_hpc.engine.interface import TensorLayout
from laminar_hpc.engine.sglang.plugin.load_slot import load_slot
from laminar_hpc.engine.sglang.plugin.protocol import TensorShard
from laminar_hpc.engine.sglang.shards import whole_sums
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.line.messages.publication import NewWeightId, Published
from laminar_hpc.line.messages.rollouts import WeightsOpened
from laminar_hpc.line.messages.training import Restored
from laminar_hpc.rollout import weight_loader
from laminar_hpc.weights import manifest, stream
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.probe import SEQUENCES, TOKENS
from laminar_hpc.weights.relay.arriving import ArrivingSums
from laminar_hpc.weights.slots import SlotReader, SlotWriter

LAYERS, EXPERTS, HIDDEN = 48, 128, 32
CHUNK = 1 << 20
MEMBERS = {"relay": WORKING // 8, "rollout": WORKING}  # of the controller, beside a trainer
COLUMNS = ("what", "who", "cpu_seconds")
Result = TypeVar("Result")
Timed = Callable[[str, str, Callable[[], Result]], Result]


def names() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor."""
    found: list[tuple[str, tuple[int, ...], str]] = [("model.embed_tokens.weight", (500, HIDDEN), "bfloat16")]
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    for layer in range(LAYERS):
        experts = [
            f"mlp.experts.{expert}.{part}_proj"
            for expert in range(EXPERTS)
            for part in ("gate", "up", "down")
        ]
        parts = [*attention, "input_layernorm", "post_attention_layernorm", "mlp.gate", *experts]
        found += [(f"model.layers.{layer}.{part}.weight", (4, HIDDEN), "bfloat16") for part in parts]
    last = [("model.norm.weight", (HIDDEN,), "bfloat16"), ("lm_head.weight", (500, HIDDEN), "bfloat16")]
    return [*found, *last]


class Rounds:
    """`rows`: of all that was timed."""

    def __init__(self, repeats: int) -> None:
        self._repeats = max(1, repeats)
        self.rows: list[dict[str, object]] = []

    def timed(self, what: str, who: str, work: Callable[[], Result]) -> Result:
        seconds = []
        for _ in range(self._repeats):
            begin = time.process_time()
            result = work()
            seconds.append(time.process_time() - begin)
        self.rows.append({"what": what, "who": who, "cpu_seconds": min(seconds)})
        return result

    def of(self, *who: str) -> float:
        return sum(float(str(row["cpu_seconds"])) for row in self.rows if row["who"] in who)


def of_links(rounds: Rounds, whole: Manifest, data: torch.Tensor) -> None:
    """What a sender and a relay do."""
    header = rounds.timed("header of the stream", "both", lambda: stream.encode_header(whole, CHUNK))
    rounds.timed("header read", "relay", lambda: stream.decode_header(header))
    rounds.timed("chunks", "both", lambda: stream.chunks(whole, CHUNK))
    found = [(entry.sum_words, entry.sum_indexed) for entry in whole.tensors]
    sums = rounds.timed("sums", "both", lambda: stream.encode_sums(found))
    target = torch.zeros_like(data)

    def arrive() -> None:
        arriving = ArrivingSums(whole, target)
        for first in range(0, data.numel(), CHUNK):
            arriving.put(first, data[first : first + CHUNK])
            arriving.grown(min(data.numel(), first + CHUNK))
        if arriving.sums != found:
            raise SystemExit("what arrived has other sums than what was sent")

    rounds.timed("copies and sums", "relay", arrive)
    rounds.timed("sums read", "relay", lambda: stream.take_sums(whole, sums))


def of_slots(rounds: Rounds, whole: Manifest, data: torch.Tensor, folder: Path) -> None:
    """What a relay, a rollout and its engine do with a slot."""
    writer, reader = SlotWriter(str(folder), "bench", 2, folder), SlotReader(str(folder), "bench")
    for number in (1, 2, 3):  # the first two make their files
        whole.weight_id = number
        if number < 3:
            torch.from_numpy(writer.begin(whole)).copy_(data)
            writer.commit(whole)
    rounds.timed("slot taken and committed", "relay", lambda: (writer.begin(whole), writer.commit(whole)))
    handle = rounds.timed("slot found", "rollout", reader.newest)
    assert handle is not None

    def leased() -> None:
        with reader.lease(handle):
            weight_loader.check_file(handle)

    rounds.timed("slot leased, file checked", "rollout", leased)
    layout = [TensorLayout(entry.name, entry.shape, entry.dtype) for entry in whole.tensors]
    rounds.timed("layout checked", "rollout", lambda: weight_loader.check_layout(layout, whole))
    held = [
        LocalSlice(entry.name, tuple(entry.shape), 0, 0, entry.shape[0], torch.zeros(entry.shape).bfloat16())
        for entry in whole.tensors
    ]
    live = rounds.timed("slot loaded", "engine", lambda: load_slot(held, handle.directory))
    shards = [TensorShard(one.name, list(one.shape), "bfloat16", 0, 0, one.length) for one in held]
    sums = rounds.timed("sums of whole tensors", "rollout", lambda: whole_sums([shards], [live]))
    rounds.timed("sums compared", "rollout", lambda: weight_loader.check_sums(sums, whole))
    writer.close()


def of_controller(rounds: Rounds, folder: Path) -> None:
    """The turns of one publication after the other."""
    hub = Hub()
    controller = controller_of(folder, hub, 0, 3600.0)

    def turn(role: str, *messages: Message) -> None:
        members = range(MEMBERS.get(role, 1))
        hub.arrived.extend((f"{role}:{index}:", message) for index in members for message in messages)
        while hub.arrived:
            controller.turn()
        hub.left.clear()

    for role, count in {"trainer": 1, **MEMBERS}.items():
        for index in range(count):
            hello = Hello(
                role, index, "", os.getpid(), f"machine{index // 8 if role == 'rollout' else index}"
            )
            hub.arrived.append((f"{role}:{index}:", hello))
    turn("trainer", Restored(None))
    logprobs, steps = [-1.0] * SEQUENCES * (TOKENS - 1), iter(range(1_000_000))

    def publication() -> None:
        step = next(steps)
        turn("trainer", NewWeightId(step))
        number = max(controller.weights.steps)
        turn("trainer", Published(number, step, 0.0, 0.0, 1.0, 1, logprobs, 0.0))
        turn("relay", RelayHas(number, step, 1, 0.1, 0.0))
        turn("rollout", WeightsOpened(number, step, 0.1, {"load": 0.1}, logprobs, 0.0))
        if controller.weights.newest is None or controller.weights.newest.weight_id != number:
            raise SystemExit(f"the controller does not know of weight id {number}")

    rounds.timed("turns of a publication", "controller", publication)
    for part in (controller.store, controller.metrics, controller.trace):
        part.close()


def measure(options: argparse.Namespace) -> None:
    tensors, rounds = names(), Rounds(options.repeats)
    whole = rounds.timed("layout", "sender", lambda: manifest.layout(tensors, 1, 0))
    data = torch.randint(0, 255, (whole.data_bytes,), dtype=torch.uint8)
    for entry in whole.tensors:
        both = tensor_sums(data[entry.offset : entry.offset + entry.nbytes])
        entry.sum_words, entry.sum_indexed = both
    folders = [Path(tempfile.mkdtemp(prefix="laminar-tensors-", dir=where)) for where in ("/dev/shm", None)]
    try:
        of_links(rounds, whole, data)
        of_slots(rounds, whole, data, folders[0])
        of_controller(rounds, folders[1])
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    figures = {
        "sender_cpu_seconds": rounds.of("sender", "both"),
        "relay_cpu_seconds": rounds.of("relay", "both"),
        "rollout_cpu_seconds": rounds.of("rollout"),
        "engine_cpu_seconds": rounds.of("engine"),
        "controller_cpu_seconds": rounds.of("controller"),
    }
    common.finish(options, {"tensors": len(tensors), **figures}, rounds.rows, COLUMNS)


if __name__ == "__main__":
    measure(common.parser(__doc__ or "").parse_args())
