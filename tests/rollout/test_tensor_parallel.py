"""One replica in two processes: its numbers are transformers', its shards' sums are the file's, and either
process's death is its own."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.engines.moving import decoding, detached, in_its_middle
from helpers.engines.pair import engine_config, file_sums, fill_slot, hf_logprobs, make_model, reference
from helpers.processes import LoopThread, ended
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.engine.interface import EngineDied, Generation, sampling_parameters
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang.plugin.live_weights import canonical_views, live_layout, live_sums
from laminar_hpc.engine.sglang.plugin.load_slot import load_slot
from laminar_hpc.engine.sglang.plugin.protocol import TensorShard
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.engine.sglang.shards import whole_sums, whole_tensors
from laminar_hpc.machine.files.shared_memory import noted
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout import weight_loader
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.weight_loader import WeightLoader
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotReader, SlotWriter


class Split:
    """An engine with rollout.tensor_parallel=2 on the weights of `models[0]`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loop = folder, LoopThread()
        self.models = [make_model(folder / f"model{seed}", seed) for seed in (0, 1)]
        config = self.config = engine_config(self.models[0])
        config.rollout.tensor_parallel = 2
        self.sampling = sampling_parameters(config.sampling, 1.0, 12, [])
        self.engine = SglangServer(config, 0, folder)
        self.loop.run(self.engine.start(self.models[0], 0, 1), seconds=250)

    def members(self) -> list[psutil.Process]:
        server = psutil.Process(self.engine.process.pid)
        return [server, *server.children(recursive=True)]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    split = Split(tmp_path_factory.mktemp("split"))
    yield split
    split.loop.run(split.engine.stop())
    split.loop.close()


# The tests with `split` are one history of one engine, in this order.


def test_two_processes_compute_what_one_does(split):
    """Sampled log-probs equal those of transformers on the whole weights."""
    model, prompt = reference(split.models[0]), [7, 77, 177, 8, 9]
    generation = split.loop.run(split.engine.generate(prompt, split.sampling, "a", "0"))
    expected = hf_logprobs(model, prompt, generation.tokens)
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_kv_moves_rank_by_rank(split):
    """Promise: a request goes on from the KV that both ranks have moved, here within one engine: same tokens
    and log-probs, a hit on all of its prefix; nothing is lost of either pool. An engine that is divided in
    another way is refused in one line."""
    engine, prompt = split.engine, [7 * i % 250 for i in range(40)]

    def greedy(length: int) -> dict:
        return sampling_parameters(split.config.sampling, 0.0, length, []) | {"ignore_eos": True}

    async def run() -> None:
        whole = await engine.generate(prompt, greedy(120), "whole", "0")
        address = await engine.kv_reserve("in", 0, 160)

        async def leaves(out: str) -> tuple[str, int, Generation]:
            call = asyncio.create_task(engine.generate(prompt, greedy(120), out, "0"))
            with pytest.raises(KvRefused, match="the destination has 1 tensor-parallel ranks, this engine 2"):
                await decoding(engine, out, f"other-{out}", json.dumps(json.loads(address)[:1]), call)
            await decoding(engine, out, out, address, call)
            return out, await detached(engine, out, out), await call

        out, sent, first = await in_its_middle([engine], "out", leaves)
        assert first.finish_reason == "moved" and sent == len(prompt) + len(first.tokens) - 1
        await engine.kv_commit(out)
        for held in (160, 0):  # nothing else stays in the cache, so only moved KV can be hit
            await engine.kv_reserve("all", 0, split.config.rollout.kv_cache_tokens - held)
            await engine.kv_abort("all")
            if held:
                tokens = [*prompt, *first.tokens.tolist()]
                assert await engine.kv_import("in", tokens) == sent
                second = await engine.generate(tokens, greedy(120 - len(first.tokens)), "second", "0")
                await engine.kv_commit("in")
        assert second.cached_tokens == sent and [*first.tokens, *second.tokens] == whole.tokens.tolist()
        assert [*first.logprobs, *second.logprobs] == pytest.approx(whole.logprobs, abs=1e-5)

    split.loop.run(run())


def test_a_pull_verifies_the_shards_of_both(split, tmp_path, monkeypatch):
    """Names and shapes are whole; the sums after a load are the manifest's; a flipped bit in any rank's shard
    is found and named."""
    monkeypatch.setattr(weight_loader, "TRIES", 0)
    writer = SlotWriter(str(tmp_path), "run", 3, split.models[0])
    pull = WeightLoader(
        SlotReader(str(tmp_path), "run"),
        probe_sequences(500),
        Trace(tmp_path, "rollout", 0),
        EngineLives(lambda: split.engine, lambda: 1),
    ).pull
    fill_slot(writer, split.models[1], 4, 2)
    pulled = split.loop.run(pull())
    assert pulled.weight_id == 4 and split.loop.run(split.engine.sums()) == file_sums(split.models[1])
    shapes = {name: list(tensor.shape) for name, tensor in load_file(split.models[0] / WEIGHTS_FILE).items()}
    assert {t.name: t.shape for t in split.loop.run(split.engine.layout())} == shapes
    monkeypatch.setattr(
        split.engine, "stop", lambda: split.engine.ping()
    )  # the weight_loader's way of giving an engine up
    for number, (name, item) in enumerate(
        [("model.layers.1.mlp.down_proj.weight", 0), ("model.layers.0.self_attn.k_proj.bias", 31)]
    ):
        directory, manifest = fill_slot(writer, split.models[0], 5 + number, 3)
        entry = next(t for t in manifest.tensors if t.name == name)
        blob = bytearray((directory / WEIGHTS_FILE).read_bytes())
        blob[len(blob) - manifest.data_bytes + entry.offset + 4 * item] ^= 1
        (directory / WEIGHTS_FILE).write_bytes(blob)
        with pytest.raises(
            LaminarError, match=rf"1 of \d+ tensors in the engine differ from the manifest, first {name}"
        ):
            split.loop.run(pull())
    writer.close()


def test_the_death_of_one_rank_is_the_engines(split):
    """The second rank's process is killed: noticed within a second while idle, named, and stopping takes all
    the others along, and the shared memory that they leave."""
    members = split.members()
    victim = next(p for p in members if p.cmdline()[0] == "sglang::scheduler_TP1")
    t0 = time.monotonic()
    victim.kill()
    split.loop.run(split.engine.process.dead.wait(), seconds=5)
    assert time.monotonic() - t0 < 1
    assert "its process sglang::scheduler_TP1 ended" in str(split.engine.process.death())
    with pytest.raises(EngineDied, match="sglang::scheduler_TP1"):
        split.loop.run(split.engine.sums())
    assert len(segments := noted(split.engine.process.folder)) == 1, (
        "SGLang's ranks talk through shared memory"
    )
    split.loop.run(split.engine.stop())
    assert ended(members) and not segments[0].exists()


# ---- shards, without an engine -----------------------------------------------------------------------------


class Engine(torch.nn.Module):
    """The parameters of one rank of a one-layer SGLang Qwen2 with one KV head, cut from `whole`, the
    vocabulary padded to 64."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int) -> None:
        super().__init__()

        def rows(name):
            return whole[name].chunk(2)[rank]

        qkv = torch.cat(
            [rows("layer.q_proj.weight"), whole["layer.k_proj.weight"], whole["layer.v_proj.weight"]]
        )
        embedding = torch.cat(
            [whole["model.embed_tokens.weight"], torch.full((4, 8), 9.0, dtype=qkv.dtype)]
        ).chunk(2)[rank]
        for name, tensor in {
            "model.embed_tokens.weight": embedding,
            "layer.qkv_proj.weight": qkv,
            "layer.gate_up_proj.weight": torch.cat(
                [rows("layer.gate_proj.weight"), rows("layer.up_proj.weight")]
            ),
            "layer.o_proj.weight": whole["layer.o_proj.weight"].chunk(2, 1)[rank],
            "norm.weight": whole["norm.weight"],
        }.items():
            module = self
            for part in name.split(".")[:-1]:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter("weight", torch.nn.Parameter(tensor.clone(), requires_grad=False))


SHAPES = {
    "model.embed_tokens.weight": (60, 8),
    "layer.q_proj.weight": (8, 8),
    "layer.k_proj.weight": (4, 8),
    "layer.v_proj.weight": (4, 8),
    "layer.gate_proj.weight": (6, 8),
    "layer.up_proj.weight": (6, 8),
    "layer.o_proj.weight": (8, 8),
    "norm.weight": (8,),
}
CONFIG = type(
    "Config", (), {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8, "vocab_size": 60}
)


def random_weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}


def test_each_rank_loads_its_slices_or_nothing(tmp_path):
    """From the same slot, straight into fused, padded and split parameters; their sums are the slot's. A slot
    of another model, or one whose file is not as its manifest says, changes nothing. A file that is rewritten
    in place, or replaced, is seen as it is now."""
    writer = SlotWriter(str(tmp_path), "run", 1, tmp_path)
    engines = [Engine(random_weights(), rank) for rank in range(2)]
    views = [list(canonical_views(engine, CONFIG, rank, 2)) for rank, engine in enumerate(engines)]
    for number in range(2):
        whole = random_weights()
        save_file(whole, tmp_path / WEIGHTS_FILE)
        directory, manifest = fill_slot(writer, tmp_path, number, number)
        sums = [load_slot(held, directory) for held in views]
        assert sums == [live_sums(held) for held in views]
        assert whole_sums([live_layout(v) for v in views], sums) == {
            t.name: (t.sum_words, t.sum_indexed) for t in manifest.tensors
        }
        for rank, engine in enumerate(engines):
            for name, expected in Engine(whole, rank).named_parameters():
                rows = (
                    min(len(expected), 60 - 32 * rank)
                    if name == "model.embed_tokens.weight"
                    else len(expected)
                )  # padding is no part
                assert torch.equal(engine.get_parameter(name)[:rows], expected[:rows]), name
    file = directory / WEIGHTS_FILE
    short = tmp_path / "short"
    short.write_bytes(file.read_bytes()[:-8])
    short.replace(file)
    with pytest.raises(LaminarError, match="not laid out as its manifest says"):
        load_slot(views[0], directory)
    with pytest.raises(LaminarError, match=r"differ in \['norm\.weight'\]"):
        other = SlotWriter(str(tmp_path), "other", 1, tmp_path)
        load_slot(
            [view for view in views[0] if view.name != "norm.weight"], fill_slot(other, tmp_path, 3, 3)[0]
        )
    assert [live_sums(held) for held in views] == sums


def test_shards_add_up_also_with_fewer_key_value_heads_than_ranks():
    """Copies (norms, the only KV head) count once, padding never; a copy that differs, a gap and a
    disagreement are said."""
    whole = random_weights()
    engines = [Engine(whole, rank) for rank in range(2)]

    def told() -> tuple[list[list[TensorShard]], list[dict]]:
        views = [list(canonical_views(engine, CONFIG, rank, 2)) for rank, engine in enumerate(engines)]
        return [live_layout(v) for v in views], [live_sums(v) for v in views]

    layouts, sums = told()
    assert {t.name: tuple(t.shape) for t in whole_tensors(layouts)} == SHAPES
    assert whole_sums(layouts, sums) == {name: tensor_sums(tensor) for name, tensor in whole.items()}
    engines[1].norm.weight[3] += 1
    with pytest.raises(LaminarError, match=r"tensor norm\.weight: .* copies that differ"):
        whole_sums(*told())
    with pytest.raises(LaminarError, match="do not agree"):
        whole_tensors([layouts[0], layouts[1][:-1]])
    with pytest.raises(LaminarError, match="only in part"):
        whole_tensors([layouts[0], layouts[0]])


def test_a_rank_may_hold_two_shards_of_a_tensor(tmp_path):
    """Where gate and up projection are one tensor of the file, as GLM-4's are: it is loaded, and its sums are
    those of the whole."""
    parts = random_weights()
    engines = [Engine(random_weights(), rank) for rank in range(2)]
    fused = {name: tensor for name, tensor in parts.items() if "gate" not in name and "up" not in name}
    fused["layer.gate_up_proj.weight"] = torch.cat(
        [parts["layer.gate_proj.weight"], parts["layer.up_proj.weight"]]
    )
    save_file(fused, tmp_path / WEIGHTS_FILE)
    directory, manifest = fill_slot(SlotWriter(str(tmp_path), "run", 3, tmp_path), tmp_path, 1, 1)
    config = type("GlmConfig", (CONFIG,), {"model_type": "glm4"})
    views = [list(canonical_views(engine, config, rank, 2)) for rank, engine in enumerate(engines)]
    sums, layouts = [load_slot(held, directory) for held in views], [live_layout(v) for v in views]
    assert sums == [live_sums(held) for held in views]
    expected = {t.name: (t.sum_words, t.sum_indexed) for t in manifest.tensors}
    assert whole_sums(layouts, sums) == expected
    assert {t.name: tuple(t.shape) for t in whole_tensors(layouts)} == {
        name: tuple(tensor.shape) for name, tensor in fused.items()
    }
    for rank, engine in enumerate(engines):
        expected = Engine(parts, rank).get_parameter("layer.gate_up_proj.weight")
        assert torch.equal(engine.get_parameter("layer.gate_up_proj.weight"), expected)
