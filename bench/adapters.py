"""Adapters beside full weights: the bytes of a publication, the time from an update to the first token on it,
and what several adapters in one batch cost an engine.

    python bench/adapters.py --json adapters.json           all three parts, 3 repeats
    python bench/adapters.py --parts decode --repeats 5

Bytes: counted from the layouts, Qwen2.5-0.5B's shape in bfloat16, rank 16 on all linear layers. Goal:
`bytes_over_full` at most 0.03.

Update: a random Qwen2 of 100 MB in float32, and rank 16 beside it. From the first byte that a relay writes
into a slot, over the pull with its checks and probes, to the first token drawn on the new version; the same
of full weights and of the adapter, in turns. What trainer and links take is not in it (bench/publish.py).

Decode: two engines on the demo's model, one with 4 adapters of rank 16 live and a fourth of the requests on
each, one without, as one that serves merged weights is. Runs of a pair follow one another, batches of 32
requests of exactly 128 tokens, sampled; `adapters_over_merged_at_32` is the median of the pairs' ratios of
tokens per second. It is reported as it is.
"""

import argparse
import asyncio
import random
import time
from pathlib import Path

import common
import torch
from half_billion import SHAPE
from publish import make_model

from laminar_hpc.config.adapters import adapter_tensors, published_parameters, widths_of
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import count_parameters, model_config
from laminar_hpc.config.schema import LoraConfig, RunConfig
from laminar_hpc.engine.interface import sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.adapter_loader import new_loader
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.weights.adapters import side_files
from laminar_hpc.weights.hf import TensorReader
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotReader, SlotWriter

RANK, LIVE, REQUESTS, TOKENS, WAVES = 16, 4, 32, 128, 2
KINDS = ("full", "adapter")
PARTS = ("bytes", "update", "decode")
COLUMNS = ("part", "what", "repeat", "value", "detail")
Tensors = dict[str, torch.Tensor]


class Side:
    """An engine of one kind with its slots, and the loader that a rollout has."""

    def __init__(self, kind: str, model: Path, folder: Path, *overrides: str) -> None:
        rank = RANK if kind == "adapter" else 0
        words = ["experiment=demo", f"model.path={model}", f"model.lora.rank={rank}", *overrides]
        self.kind, self.model = kind, model
        self.config: RunConfig = load_config([*words, "rollout.engine_start_seconds=600"])
        self.engine = SglangServer(self.config, KINDS.index(kind), folder)
        shm, name = self.config.relay.shm_dir, f"bench-{folder.name}-{kind}"
        self.writer = SlotWriter(shm, name, LIVE + 1, model, side_files(self.config))
        probe = probe_sequences(model_config(str(model))["vocab_size"])
        lives, trace = EngineLives(lambda: self.engine, lambda: 0), Trace(folder, "rollout", 0)
        self.loader = new_loader(SlotReader(shm, name), probe, trace, lives, self.config)

    async def start(self) -> None:
        await self.engine.start(self.model, None if self.kind == "adapter" else 0, 1)

    def tensors(self, seed: int) -> Tensors:
        """Those of a publication, other ones for each seed."""
        draw = torch.Generator().manual_seed(seed)
        if self.kind == "full":
            with TensorReader(self.model) as reader:
                names = sorted(reader.names())
                return {
                    n: reader.narrow(n, 0, 0, reader.shape(n)[0]).contiguous() * (1 + seed) for n in names
                }
        model = model_config(str(self.model))
        shapes = adapter_tensors(widths_of(model), model["num_hidden_layers"], self.config.model.lora)
        return {name: torch.randn(shape, generator=draw) * 0.02 for name, shape in shapes}

    def receive(self, tensors: Tensors, weight_id: int) -> int:
        """What a relay does with a publication that arrives; returns its bytes."""
        shapes = [(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
        manifest = layout(shapes, weight_id, weight_id)
        data = torch.from_numpy(self.writer.begin(manifest))
        for entry in manifest.tensors:
            tensor = tensors[entry.name]
            data[entry.offset : entry.offset + entry.nbytes] = tensor.view(-1).view(torch.uint8)
            entry.sum_words, entry.sum_indexed = tensor_sums(tensor)
        self.writer.commit(manifest)
        return manifest.data_bytes

    async def draw(self, name: str, ids: list[int], tokens: int) -> int:
        """A request for each of `ids`; returns the number of tokens drawn."""
        draw, vocabulary = random.Random(name), model_config(str(self.model))["vocab_size"]
        sampling = sampling_parameters(self.config.sampling, 1.0, tokens, []) | {"ignore_eos": True}
        prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(8, 192))] for _ in ids]
        calls = [
            self.engine.generate(prompt, sampling, f"{name}-{i}", str(weight_id))
            for i, (prompt, weight_id) in enumerate(zip(prompts, ids, strict=True))
        ]
        return sum(len(answer.tokens) for answer in await asyncio.gather(*calls))

    async def stop(self) -> None:
        await self.engine.stop()
        self.writer.close()


def count_bytes() -> tuple[list[dict], dict]:
    """Of one publication of each kind."""
    lora = LoraConfig(rank=RANK)
    full, adapter = 2 * count_parameters(SHAPE), 2 * published_parameters(SHAPE, lora)
    rows = [
        {"part": "bytes", "what": "full, MB", "value": full / 1e6},
        {"part": "bytes", "what": f"adapter of rank {RANK}, MB", "value": adapter / 1e6},
    ]
    return rows, {"bytes_over_full": adapter / full}


async def measure_update(options: argparse.Namespace, folder: Path) -> tuple[list[dict], dict]:
    """Seconds from an update to the first token on it, of either kind."""
    make_model(folder / "model", "100MB")
    small = ("rollout.kv_cache_tokens=8192", "sampling.max_response_tokens=256")
    sides = [Side(kind, folder / "model", folder, *small) for kind in KINDS]
    rows: list[dict] = []
    try:
        await asyncio.gather(*(side.start() for side in sides))
        for repeat in range(options.repeats + LIVE + 1):  # the first of each slot takes its memory
            for side in sides:
                tensors = side.tensors(repeat)
                began = time.perf_counter()
                size = side.receive(tensors, repeat + 1)
                there = time.perf_counter()
                pulled = await side.loader.pull()
                await side.draw(f"first-{repeat}", [pulled.weight_id], 1)
                seconds = time.perf_counter() - began
                detail = f"{size / 1e6:.1f} MB: received {there - began:.3f} pulled {pulled.seconds:.3f}"
                if repeat > LIVE:
                    row = {"part": "update", "what": f"{side.kind}, seconds", "repeat": repeat - LIVE}
                    rows.append({**row, "value": seconds, "detail": detail})
    finally:
        await asyncio.gather(*(side.stop() for side in sides))
    medians = {
        f"{kind}_update_seconds": common.median(
            [row["value"] for row in rows if row["what"].startswith(kind)]
        )
        for kind in KINDS
    }
    ratio = medians["adapter_update_seconds"] / medians["full_update_seconds"]
    return rows, {**medians, "update_over_full": ratio}


async def measure_decode(options: argparse.Namespace, folder: Path) -> tuple[list[dict], dict]:
    """Tokens per second with several adapters live, and with none."""
    demo = Path(load_config(["experiment=demo"]).model.path)
    sides = [Side(kind, demo, folder) for kind in KINDS]
    rows: list[dict] = []
    try:
        await asyncio.gather(*(side.start() for side in sides))
        adapters = sides[1]
        for weight_id in range(1, LIVE + 1):
            adapters.receive(adapters.tensors(weight_id), weight_id)
            slot = adapters.loader.reader.find(weight_id)
            await adapters.engine.load_adapter(slot.directory, weight_id)
        ids = {
            "full": [0] * REQUESTS,
            "adapter": [1 + i % LIVE for i in range(REQUESTS)],
            "one": [1] * REQUESTS,
        }
        for repeat in range(options.repeats + 1):  # the first warms up
            speeds = {}
            for what, side in (("full", sides[0]), ("adapter", adapters), ("one", adapters)):
                began = time.perf_counter()
                drawn = [
                    await side.draw(f"{repeat}-{wave}-{what}", ids[what], TOKENS) for wave in range(WAVES)
                ]
                speeds[what] = sum(drawn) / (time.perf_counter() - began)
            for what, speed in speeds.items() if repeat else ():
                row = {"part": "decode", "what": f"{what}, tokens/s", "repeat": repeat, "value": speed}
                rows.append({**row, "over": speed / speeds["full"]})
    finally:
        await asyncio.gather(*(side.stop() for side in sides))
    found = {
        what: common.median([row["over"] for row in rows if row["what"].startswith(what)])
        for what in ("adapter", "one")
    }
    return rows, {
        f"adapters_over_merged_at_{REQUESTS}": found["adapter"],
        f"one_adapter_over_merged_at_{REQUESTS}": found["one"],
    }


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"default {','.join(PARTS)}"
    )
    options = options.parse_args()
    rows, figures = [], {}
    with common.run_folder(options) as folder:
        for part in options.parts:
            if part == "bytes":
                found = count_bytes()
            else:
                measure = {"update": measure_update, "decode": measure_decode}[part]
                found = asyncio.run(measure(options, folder))
            rows += found[0]
            figures |= found[1]
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
