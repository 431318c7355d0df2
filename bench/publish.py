"""The way of a weight: publishing from a real Megatron trainer to real relay processes, and a real SGLang
engine's pull.

    python bench/publish.py --json publish.json     random Qwen2 models of 100 MB and 1 GB, float32, 3 repeats
    python bench/publish.py --sizes 100MB --repeats 5 --parts publish

Publishing: steps of the trainer in turns, with a publication behind them and without, all relays idle again
before each; to one relay, which a machine has, and for the time to the last one to a chain of two on this
machine, whose cores they share. Pull: from the request to the verified id, by slots that the engine has
loaded before. Beside each time stands its limit: one memcpy of as many bytes in the same process and between
the same steps, into memory that is mapped already; both are medians. The probe's log-probs, which trainer and
engine compute for each id, are a forward pass and no part of the way: they are listed apart and left out of
the ratios.

Copy: what a relay does with a chunk, copy and sums in one pass, beside a memcpy of as many bytes by as many
threads, and the sums alone of a chunk that is in its place.

Figures, overlapped publishing of the largest model: `one_pass_over_memcpy`, memcpy's time over that of copy
and sums, two threads each (goal: at least 0.8); `stall_over_memcpy`, the trainer stands still (goal: at
most 0.3), `step_inflation`, how much longer a step takes (goal: at most 2.5), both in memcpys;
`pull_over_memcpy`, memcpy's time over the pull's (goal: at least 0.3).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from publish_roles import Script, context

SHAPES = {  # name -> hidden, intermediate, layers, heads, vocabulary; 2 KV heads, tied
    "100MB": (512, 1408, 7, 8, 10_000),
    "1GB": (1536, 4864, 8, 12, 16_384),
}
GROUPS, SAMPLES, TOKENS = 2, 2, 24  # of a step's batch
CHUNK, COPIES = 64 << 20, 20
COLUMNS = ("size", "what", "seconds", "memcpy seconds", "in memcpys", "parts")


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--sizes", type=lambda text: text.split(","), default=list(SHAPES), help="default 100MB,1GB"
    )
    options.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=["copy", "publish", "pull"],
        help="default copy,publish,pull",
    )
    options.add_argument("--child", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.child:
        part, size = options.child.split(":")
        measure = {"copy": measure_copy, "publish": measure_publish, "pull": measure_pull}[part]
        print(json.dumps(measure(options, size)))
        return
    rows, figures = [], {}
    with common.run_folder(options) as folder:
        for size in options.sizes:
            make_model(folder / size, size)
            for part in options.parts:
                found = child(options, part, size, folder)
                rows += found["rows"]
                figures |= found["figures"] if size == options.sizes[-1] else {}
    common.finish(options, figures, rows, COLUMNS)


def child(options: argparse.Namespace, part: str, size: str, folder: Path) -> dict:
    words = [
        "--child",
        f"{part}:{size}",
        "--repeats",
        str(options.repeats),
        "--runs-dir",
        str(folder),
        *options.overrides,
    ]
    print(f"  {part} {size}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, *words]
    one = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=one, stdout=subprocess.PIPE, timeout=options.run_seconds, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def make_model(directory: Path, size: str) -> None:
    import torch

    import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)

    from transformers import Qwen2Config, Qwen2ForCausalLM  # isort: skip

    if (directory / "config.json").exists():
        return
    hidden, ffn, layers, heads, vocabulary = SHAPES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        dtype=torch.float32,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")


class Memcpy:
    """Copies of so many bytes in one thread, into memory that has been written before."""

    def __init__(self, count: int) -> None:
        import torch

        self._source, self._target = (torch.ones(count, dtype=torch.uint8) for _ in range(2))

    def seconds(self) -> float:
        """One memcpy (torch copies one-dimensional bytes by memcpy, in the calling thread with
        OMP_NUM_THREADS=1)."""
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started


def row(size: str, what: str, seconds: float, memcpy: float, parts: object = "") -> dict:
    return {
        "size": size,
        "what": what,
        "seconds": seconds,
        "memcpy seconds": memcpy,
        "in memcpys": seconds / memcpy,
        "parts": parts,
    }


# ---- copy and sums -----------------------------------------------------------------------------------------


def measure_copy(options: argparse.Namespace, size: str) -> dict:
    """A chunk's copy with sums and a memcpy, in turns, in memory that is mapped already."""
    import torch

    from laminar_hpc.weights.kernels.host import move

    source = torch.randint(0, 255, (CHUNK,), dtype=torch.uint8)
    target, threads = torch.zeros_like(source), 2
    torch.set_num_threads(threads)
    halves = list(zip(target.chunk(threads), source.chunk(threads), strict=True))
    copies, passes, alone = [], [], []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(COPIES + 1):
            started = time.perf_counter()
            list(pool.map(lambda pair: torch.Tensor.copy_(*pair), halves))
            copied = time.perf_counter()
            both = move(target, source)
            copies.append(copied - started)
            moved = time.perf_counter()
            passes.append(moved - copied)
            move(target, target)
            alone.append(time.perf_counter() - moved)
    if both is None:
        raise SystemExit("there is no laminar_hpc._sums: apt-get install g++, then make setup")
    ratios = [copy / one for copy, one in zip(copies[1:], passes[1:], strict=True)]
    sums = [one / each for one, each in zip(passes[1:], alone[1:], strict=True)]
    memcpy = statistics.median(copies[1:])
    rows = [
        row(size, "copy and sums of 64 MB", statistics.median(passes[1:]), memcpy),
        row(size, "sums alone", statistics.median(alone[1:]), memcpy),
    ]
    figures = {
        "one_pass_over_memcpy": statistics.median(ratios),
        "one_pass_over_sums": statistics.median(sums),
    }
    return {"rows": rows, "figures": figures}


# ---- publishing --------------------------------------------------------------------------------------------


def make_batch(vocabulary: int, seed: int) -> list:
    import random

    draw, batch = random.Random(seed), []
    for i in range(GROUPS * SAMPLES):
        prompt, response = ([draw.randrange(vocabulary) for _ in range(n)] for n in (4, TOKENS))
        batch.append(common.whole(i, i // SAMPLES, prompt, response, [-9.0] * TOKENS))
        batch[-1].record.reward = float(i % SAMPLES)
    return batch


def settings(options: argparse.Namespace, size: str) -> object:
    from laminar_hpc.config.load import load_config

    words = [
        "experiment=demo",
        f"model.path={options.runs_dir / size}",
        "model.dtype=float32",
        "relay.slots=2",
        "guard.enabled=false",  # the log-probs of the batch are no engine's
        *options.overrides,
    ]
    config = load_config(words)
    (
        config.algorithm.prompts_per_step,
        config.algorithm.samples_per_prompt,
        config.algorithm.minibatches_per_step,
    ) = GROUPS, SAMPLES, 1
    return config


def measure_publish(options: argparse.Namespace, size: str) -> dict:
    """Both modes: pairs of a step without and a step with a publication."""
    import torch
    import torch.distributed as dist

    from laminar_hpc.line.messages.chain import RelayHas
    from laminar_hpc.line.messages.publication import Published
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.publishing.publisher import Publisher
    from laminar_hpc.trainer.step.batch import in_memory
    from laminar_hpc.trainer.step.learner import Learner
    from laminar_hpc.weights.manifest import layout

    config = settings(options, size)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    policy = MegatronPolicy(config)
    learner, script, rows, figures = Learner(config, policy), Script(config, options.runs_dir), [], {}
    count = layout(policy.canonical_metadata(), 0, 0).data_bytes
    batch, sent, expected = in_memory(make_batch(policy.shape.vocab, 0)), 0, 0
    copy = Memcpy(count)
    for mode, relays in (("overlapped", 1), ("blocking", 1), ("overlapped", 2)):
        config.relay.publish, script.relays = mode, relays
        publisher = Publisher(context(config, "trainer", 0, script.trainer, options.runs_dir), policy)
        script.link()
        without, stalls, more, first, last, probes, sends, copies = [], [], [], [], [], [], [], []
        for repeat in range(-1, options.repeats):  # one to warm up
            started = time.perf_counter()
            learner.train(batch, 0, lambda: None)
            plain = time.perf_counter() - started
            started, before = time.perf_counter(), time.time()
            publisher.publish(repeat + 1)
            sent += 1
            if repeat < 0:
                script.wait_for(Published, sent)  # the link is there from now on
            learner.train(batch, 0, publisher.fence)
            seconds = time.perf_counter() - started
            told = script.wait_for(Published, sent)[-1]
            expected += relays
            has = script.wait_for(RelayHas, expected)[-relays:]
            if repeat >= 0:
                copies.append(copy.seconds())
                without.append(plain)
                probes.append(told.probe_seconds)
                stalls.append(told.stall_seconds)
                more.append(seconds - told.probe_seconds - plain)
                sends.append(told.seconds)
                times = sorted(one.time - before - told.probe_seconds for one in has)
                first.append(times[0])
                last.append(times[-1])
        publisher.close()
        memcpy = statistics.median(copies)
        median = {
            "step without": without,
            "trainer stands still": stalls,
            "step longer by": more,
            "send": sends,
            "first relay has it": first,
            "last relay has it": last,
            "probe": probes,
        }
        name = mode if relays == 1 else f"{mode}, {relays} relays"
        rows += [
            row(
                size,
                f"{name}: {what}",
                statistics.median(values),
                memcpy,
                " ".join(f"{v:.3f}" for v in values),
            )
            for what, values in median.items()
        ]
        if relays > 1:
            continue
        prefix = "" if mode == "overlapped" else "blocking_"
        figures[f"{prefix}stall_over_memcpy"] = statistics.median(stalls) / memcpy
        figures[f"{prefix}step_inflation"] = statistics.median(more) / memcpy
        figures[f"{prefix}bytes_over_canonical"] = told.bytes / count
    script.stop()
    return {"rows": rows, "figures": figures}


# ---- pull --------------------------------------------------------------------------------------------------


def measure_pull(options: argparse.Namespace, size: str) -> dict:
    return asyncio.run(pull(options, size))


async def pull(options: argparse.Namespace, size: str) -> dict:
    import torch

    from laminar_hpc.engine.sglang.server import SglangServer
    from laminar_hpc.machine.observability.trace import Trace
    from laminar_hpc.rollout.engine_lives import EngineLives
    from laminar_hpc.rollout.weight_loader import WeightLoader
    from laminar_hpc.weights.hf import TensorReader
    from laminar_hpc.weights.kernels.sums import tensor_sums
    from laminar_hpc.weights.manifest import layout
    from laminar_hpc.weights.probe import probe_sequences
    from laminar_hpc.weights.slots import SlotReader, SlotWriter

    config, folder = settings(options, size), options.runs_dir
    directory = Path(config.model.path)
    config.rollout.kv_cache_tokens, config.rollout.engine_start_seconds = 8192, 600.0
    (folder / "logs").mkdir(exist_ok=True)
    writer = SlotWriter(config.relay.shm_dir, f"bench-{folder.name}-pull", 2, directory)
    engine = SglangServer(config, 0, folder)
    reader = SlotReader(config.relay.shm_dir, f"bench-{folder.name}-pull")
    weight_loader = WeightLoader(
        reader,
        probe_sequences(SHAPES[size][-1]),
        Trace(folder, "rollout", 0),
        EngineLives(lambda: engine, lambda: 0),
    )
    try:
        await engine.start(directory, 0, 0)
        found, copies, copy = (
            [],
            [],
            Memcpy(sum(file.stat().st_size for file in directory.glob("*.safetensors"))),
        )
        with TensorReader(directory) as tensors:
            names = [(name, tuple(tensors.shape(name)), "float32") for name in sorted(tensors.names())]
            for number in range(1, options.repeats + 3):  # two to warm up, one of each slot
                manifest = layout(names, number, number)
                data = torch.from_numpy(writer.begin(manifest))
                for entry in manifest.tensors:
                    tensor = tensors.narrow(entry.name, 0, 0, entry.shape[0]).contiguous() * number
                    data[entry.offset : entry.offset + entry.nbytes] = tensor.view(-1).view(torch.uint8)
                    entry.sum_words, entry.sum_indexed = tensor_sums(tensor)
                writer.commit(manifest)
                copies.append(copy.seconds())
                found.append(await weight_loader.pull())
                if found[-1].weight_id != number:
                    raise SystemExit(f"weight id {found[-1].weight_id} was pulled, {number} was expected")
    finally:
        await engine.stop()
        writer.close()
    memcpy, measured = statistics.median(copies[2:]), found[2:]
    ways = [one.seconds - one.phases["probe"] for one in measured]
    parts = {name: statistics.median(one.phases[name] for one in measured) for name in measured[0].phases}
    text = " ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    rows = [
        row(size, "pull, verified", statistics.median(ways), memcpy, text),
        row(size, "pull with the probe", statistics.median(one.seconds for one in measured), memcpy),
        row(size, "first pull of a slot", found[1].seconds - found[1].phases["probe"], memcpy),
    ]
    return {"rows": rows, "figures": {"pull_over_memcpy": memcpy / statistics.median(ways)}}


if __name__ == "__main__":
    main()
