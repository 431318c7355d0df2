"""GPU types and models: what ships, a user's own, and a model directory."""

import json
from dataclasses import replace

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.settings import load_plan, load_simulation
from laminar_hpc.simulator.sweep import point
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_fit import fitting_trainer, serves, shards

# billions of parameters, all and used by a token, as their publishers give them
PUBLISHED = {
    "0.5B": (0.49, 0.49),
    "7B": (7.62, 7.62),
    "32B": (32.8, 32.8),
    "72B": (72.7, 72.7),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Llama-3.1-405B": (405, 405),
    "DeepSeek-V3": (671, 37),
    "Kimi-K2": (1040, 32),
}
SMALL = ["workload.prompts_per_step=16", "workload.samples_per_prompt=4", "workload.updates_per_step=2"]
SHORT = [*SMALL, "workload.mean_response_tokens=500", "workload.max_response_tokens=2000", "steps=2"]
TINY = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}


X1 = "X1: {hbm: 1000, tflops: 500, memory: 64, nvlink: 100, nic: 25, pcie: 25, price: 1}"


def entry(more: dict | None = None, **config: object) -> str:
    """A table of the model m: TINY with other values in its config."""
    return json.dumps({"m": {"path": "me/tiny", "config": TINY | config, **(more or {})}})


@pytest.fixture(autouse=True)
def as_shipped():
    """Tables that a test adds to are as before after it."""
    shipped = dict(GPUS), dict(MODELS)
    yield
    for table, before in zip((GPUS, MODELS), shipped, strict=True):
        table.clear()
        table.update(before)


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters_are_those_that_are_published(name, published):
    """Counted from the config; embeddings that are only looked up are not used by a token."""
    found = MODELS[name]
    assert abs(found.parameters / 1e9 / published[0] - 1) < 0.02
    assert abs(found.active_parameters / 1e9 / published[1] - 1) < 0.09


def test_kv_of_latent_attention_is_the_latent_alone():
    """DeepSeek-V3: 61 layers of 512 + 64 values, the same on every rank."""
    assert MODELS["DeepSeek-V3"].kv_bytes == 61 * 576 * 2 and MODELS["DeepSeek-V3"].kv_heads == 1


@pytest.mark.parametrize("gpu", ["A100", "H200", "B200", "MI300X"])
def test_any_model_on_any_gpu(gpu):
    """Promise: every shipped pair runs where it fits."""
    words = [f"trainer_gpu={gpu}", f"rollout_gpu={gpu}", "model=Qwen3-30B-A3B", "tensor_parallel=4", *SHORT]
    config = load_simulation("laminar", [*words, "warmup_steps=1", "gpus=[64]"])
    assert point(config, "laminar", 64, 32, 2).figures["tokens_per_second"] > 0


def test_tables_of_ones_own(tmp_path):
    """Promise: DIR/tables/*.yaml of --config-dir DIR adds entries that every key takes."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "gpus.yaml").write_text(X1)
    (tmp_path / "tables" / "models.yaml").write_text(entry())
    words = ["--config-dir", str(tmp_path), "model=m", "trainer_gpu=X1", "rollout_gpu=X1", *SHORT]
    config = load_simulation("laminar", [*words, "warmup_steps=1", "gpus=[8]"])
    assert config.model == "m" and MODELS["m"].tensor_parallel == 1
    assert point(config, "laminar", 8, 4, 2).figures["tokens_per_second"] > 0


def test_a_model_directory_is_a_model(tmp_path):
    """Promise: model=DIR takes the config.json of a Hugging Face directory."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = load_simulation("laminar", [f"model={tmp_path}", *SHORT, "warmup_steps=1", "gpus=[8]"])
    assert MODELS[config.model].layers == 4


def test_a_layout_is_that_of_the_entry_not_of_its_path():
    """Two entries may have one path, as when one's own table changes an entry."""
    w, small, large = WorkloadConfig(), MODELS["7B"], MODELS["32B"]
    found = [fitting_trainer(each, GPUS["H800"], 8, w) for each in (small, large)]
    assert fitting_trainer(replace(large, path=small.path), GPUS["H800"], 8, w) == found[1] != found[0]


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", "x"), ("max_position_embeddings", None)])
def test_a_directory_that_is_no_model_is_refused(tmp_path, key, value):
    """Which key of its config.json is wrong or missing."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {key: value}))
    with pytest.raises(LaminarError, match=f"config.json: {key}={value}: must be a whole number"):
        load_plan("mixed", [f"model={tmp_path}"])


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("gpus.yaml", "X1: {hbm: 1000}", "gpus.yaml: X1 has no"),
        ("gpus.yaml", "X1: {hbm: -1}", "X1.hbm=-1: must be a number above 0"),
        ("gpus.yaml", "X1: {hmb: 1}", "X1.hmb: no such key (did you mean hbm?)"),
        ("gpus.yaml", "X1", "it needs NAME"),
        ("gpus.yaml", "X1: {", "cannot be read"),
        ("gpus.yaml", "X1: {1: 1}", "X1.1: no such key"),
        ("gpus.yaml", X1.replace("price", "machine: 4.5, price"), "X1.machine=4.5: must be a whole number"),
        ("models.yaml", "m: {path: a/b, config: {model_type: llama}}", "m has no num_hidden_layers"),
        ("models.yaml", "m: {path: a/b, config: [1]}", "config must be the table of a config.json"),
        ("models.yaml", entry(num_hidden_layers=0), "num_hidden_layers=0: must be a whole number"),
        ("models.yaml", entry(num_hidden_layers="four"), "num_hidden_layers=four: must be a whole number"),
        ("models.yaml", entry(num_experts="some"), "m: its numbers are none of a model"),
        ("models.yaml", entry(num_experts=8), "m has no num_experts_per_tok"),
        ("models.yaml", entry({"tensor_parallel": "two"}), "m.tensor_parallel=two: must be a whole number"),
        ("models.yaml", entry({"tensor_paralel": 2}), "no such key (did you mean tensor_parallel?)"),
        ("other.yaml", "a: 1", "neither gpus.yaml nor models.yaml"),
    ],
)
def test_wrong_tables_are_refused_in_one_line(tmp_path, file, text, wrong):
    """File, entry and key of what is wrong."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / file).write_text(text)
    with pytest.raises(LaminarError) as error:
        load_simulation("laminar", ["--config-dir", str(tmp_path)])
    assert wrong in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_laminar_does_not_train_is_not_planned():
    """Promise: no plan for a family that a run would refuse."""
    with pytest.raises(LaminarError, match="family deepseek_v3, which can be simulated but not planned"):
        load_plan("mixed", ["model=DeepSeek-V3"])


@pytest.mark.parametrize("name", MODELS)
def test_every_shipped_model_is_simulated_as_it_is(name):
    """Promise: no model of the tables is refused at its own tensor parallel size, also not where key-value
    heads are fewer."""
    gpus = ["rollout_gpu=B200", "trainer_gpu=B200", "gpus=[1024]"]
    assert load_simulation("laminar", [f"model={name}", *gpus]).model == name


@pytest.mark.parametrize(
    ("name", "fits"), [("0.5B", {1, 2}), ("3B", {1, 2, 4, 8, 16}), ("14B", {1, 2, 4, 8})]
)
def test_engines_copy_key_value_heads_and_trainers_do_not(name, fits):
    """Promise: the rules are those of config/rules.py: an engine may have more ranks than key-value heads."""
    model = MODELS[name]
    assert {n for n in (1, 2, 4, 8, 16) if serves(model, n)} == fits
    assert {n for n in (1, 2, 4, 8, 16) if shards(model, n)} == {n for n in fits if n <= model.kv_heads}
