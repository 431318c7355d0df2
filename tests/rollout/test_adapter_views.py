"""An adapter in SGLang's memory pool, without an engine: where each tensor-parallel rank's part of it lies,
what a ring of slots has of it, and how an engine is started for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers.engines.adapters import RANK, fill_adapter_slot, manifest_sums, slot_writer
from helpers.refusals import refusal
from laminar_hpc.config.adapter_places import adapters_at_once, slots_of
from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_tensors, widths_of
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang.command_line import arguments, refused_arguments
from laminar_hpc.engine.sglang.plugin.adapters import adapter_views
from laminar_hpc.engine.sglang.plugin.live_weights import canonical_views, live_layout
from laminar_hpc.engine.sglang.plugin.load_slot import load_slot
from laminar_hpc.engine.sglang.shards import whole_sums, whole_tensors
from laminar_hpc.rollout.adapter_loader import AdapterLost, check_acts
from laminar_hpc.weights.adapters import side_files
from laminar_hpc.weights.manifest import layout, safetensors_header
from laminar_hpc.weights.slots import SlotReader

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, LAYERS, PLACES = 8, 4, 2, 2, 12, 2, 3
MODEL = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "vocab_size": 20,
}


def adapted(*words: str) -> RunConfig:
    return load_config(["experiment=demo", f"model.lora.rank={RANK}", *words])


def rank_views(rank: int, ranks: int, targets: set[str]) -> Iterator:
    """The views of one rank whose parameters and pool are as SGLang makes them, wrapped for adapters."""
    queries, keys = HEADS * HEAD // ranks, max(1, KV_HEADS // ranks) * HEAD
    widths = {  # fused projection -> outputs, inputs, and parts of this rank
        "self_attn.qkv_proj": (queries + 2 * keys, HIDDEN, 3),
        "self_attn.o_proj": (HIDDEN, queries, 1),
        "mlp.gate_up_proj": (2 * FFN // ranks, HIDDEN, 2),
        "mlp.down_proj": (HIDDEN, FFN // ranks, 1),
    }
    parameters = [
        (f"model.layers.{layer}.{name}.base_layer.weight", torch.zeros(outputs, inputs))
        for layer in range(LAYERS)
        for name, (outputs, inputs, _) in widths.items()
    ]
    parameters.append(("model.layers.0.input_layernorm.weight", torch.zeros(HIDDEN)))
    pool = SimpleNamespace(max_lora_rank=RANK, A_buffer={}, B_buffer={})
    for name, (outputs, inputs, parts) in widths.items():
        if (target := name.partition(".")[2]) in targets:
            a, b = (PLACES, parts * RANK, inputs), (PLACES, outputs, RANK)
            pool.A_buffer[target] = [torch.full(a, 7.0) for _ in range(LAYERS)]
            pool.B_buffer[target] = [torch.full(b, 7.0) for _ in range(LAYERS)]
    model = SimpleNamespace(named_parameters=lambda: iter(parameters))
    held = canonical_views(model, SimpleNamespace(**MODEL), rank, ranks)
    return adapter_views(held, pool, place=1)


@pytest.mark.parametrize("ranks", [1, 2, 4])  # at 4 two ranks have the same key-value head
@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
def test_the_ranks_parts_are_the_adapter(ranks: int, targets: str, tmp_path: Path) -> None:
    """Promise: what the ranks have taken from a slot covers each of PEFT's tensors, and has the sums of the
    manifest, however q, k and v, and gate and up, are fused and split."""
    lora = adapted(f"model.lora.targets={targets}").model.lora
    shapes = dict(adapter_tensors(widths_of(MODEL), LAYERS, lora))
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    writer = slot_writer(tmp_path, tmp_path)
    directory, manifest = fill_adapter_slot(writer, tensors, 3)
    attention, mlp = {"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"}
    fused = {"attention": attention, "mlp": mlp, "all": attention | mlp}[targets]
    views = [list(rank_views(rank, ranks, fused)) for rank in range(ranks)]
    layouts, sums = [live_layout(iter(v)) for v in views], [load_slot(v, directory) for v in views]
    assert {t.name: tuple(t.shape) for t in whole_tensors(layouts)} == shapes
    assert whole_sums(layouts, sums) == manifest_sums(manifest)
    writer.close()


def test_a_slot_is_a_directory_of_peft(tmp_path: Path) -> None:
    """Promise: its file and its settings are those that PEFT reads; the ring keeps as many versions as
    trajectories may be of, and the oldest goes first; a relay that is started again finds its slots."""
    config = adapted("pipeline.max_staleness=3")
    model = model_config(config.model.path)
    shapes = adapter_tensors(widths_of(model), model["num_hidden_layers"], config.model.lora)
    tensors = {name: torch.randn(shape) for name, shape in shapes}
    assert slots_of(config) == adapters_at_once(config.pipeline) == 6
    for life in range(2):
        writer = slot_writer(tmp_path, tmp_path, slots_of(config))
        writer._side = side_files(config)
        for weight_id in range(8):
            directory, manifest = fill_adapter_slot(writer, tensors, 10 * life + weight_id)
        assert sorted(each[0] for each in SlotReader(str(tmp_path), "adapters")._complete()) == [
            10 * life + number for number in range(2, 8)
        ]
    settings = json.loads((directory / ADAPTER_CONFIG_FILE).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (RANK, 32, "LORA")
    size = len(safetensors_header(manifest)) + manifest.data_bytes
    assert (directory / ADAPTER_FILE).stat().st_size == size
    found = load_file(directory / ADAPTER_FILE)
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], t) for n, t in tensors.items())
    writer.close()


def test_without_adapters_slots_and_engines_are_as_ever() -> None:
    """Promise: a run that trains all weights has the slots that relay.slots says and an engine without
    places for adapters."""
    config = load_config(["experiment=demo"])
    assert slots_of(config) == config.relay.slots and side_files(config) is None
    assert not any("lora" in word for word in arguments(config, Path("/m"), "0", 0))


@pytest.mark.parametrize("gpu", [False, True])
def test_an_engine_has_a_place_for_each_adapter(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: as many as trajectories may be of, the newest, one that arrives, and the model alone; on a GPU
    SGLang's own backend, which decodes in CUDA graphs, and graphs as ever."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if gpu else "")
    words = arguments(adapted("pipeline.max_staleness=1", "model.lora.targets=attention"), Path("/m"), "0", 0)
    assert "--enable-lora" in words
    assert words[words.index("--max-loras-per-batch") + 1] == "5"
    assert words[words.index("--max-lora-rank") + 1] == str(RANK)
    assert words[words.index("--lora-target-modules") + 1 :] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert ("--lora-backend" in words) != gpu and ("--cuda-graph-config" in words) == gpu


def test_what_does_not_go_with_adapters_is_one_line() -> None:
    """Promise: arguments of SGLang's that are ours, and a request that would outlive its adapter."""
    for name, key in (
        ("enable-lora", "model.lora.rank"),
        ("lora-paths", "model.lora.path"),
        ("max-loras-per-batch", "pipeline.max_staleness"),
    ):
        (line,) = refused_arguments(adapted(f"rollout.engine_arguments.{name}=x"))
        assert line == f"rollout.engine_arguments.{name}: set {key} and leave it out"
    (line,) = refusal(
        "train", "experiment=demo", "model.lora.rank=4", "pipeline.refresh=interrupt", "pipeline.keep_kv=true"
    )
    assert "does not go with" in line and "stays with the adapter that it names" in line


def test_an_adapter_acts_or_begins_at_zero() -> None:
    """Promise: log-probs that an adapter leaves as they are without it are an error, unless its B is zero."""
    names = [("base_model.model.x.lora_A.weight", (2, 2), "float32"), ("x.lora_B.weight", (2, 2), "float32")]
    manifest = layout(names, 4, 4)
    manifest.tensors[0].sum_words = 5
    assert check_acts("engine 0", [-1.0, -2.0], [-1.0, -2.0], manifest) == 0.0
    manifest.tensors[1].sum_words = 5
    assert check_acts("engine 0", [-1.0, -2.5], [-1.0, -2.0], manifest) == 0.25
    assert check_acts("emulated engine 0", [], [], manifest) == 0.0
    with pytest.raises(AdapterLost, match="engine 0 holds the adapter of weight id 4"):
        check_acts("engine 0", [-1.0, -2.0], [-1.0, -2.0], manifest)
