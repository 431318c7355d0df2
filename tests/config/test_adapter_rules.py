"""What a low-rank adapter means before a run: bytes, memory, and one line for each adapter that is not this
run's."""

import json
import re
import struct
from pathlib import Path

import pytest

from laminar_hpc.config.adapter_check import adapter_problems
from laminar_hpc.config.adapter_places import slots_of
from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_tensors, widths_of
from laminar_hpc.config.check import derive, derived_values, problems
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import count_parameters, known_models, model_config
from laminar_hpc.config.schema import LoraConfig, RunConfig
from laminar_hpc.weights.adapters import adapted, adapter_config
from laminar_hpc.weights.hf import read_shape

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
}
LORA = LoraConfig(rank=4, alpha=12.0)


def write(folder: Path, tensors: dict[str, tuple[int, ...]], **settings: object) -> Path:
    """An adapter's directory whose tensors have a header alone, which is all that is read before a run."""
    folder.mkdir(exist_ok=True)
    text = {**adapter_config(LORA, str(folder.parent / "model")), **settings}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(text))
    fields = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()
    }
    header = json.dumps(fields).encode()
    (folder / ADAPTER_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def tensors_of(lora: LoraConfig = LORA, layers: int = 2) -> dict[str, tuple[int, ...]]:
    return dict(adapter_tensors(widths_of(MODEL), layers, lora))


def found(folder: Path, base: Path, **settings: object) -> list[str]:
    config = RunConfig()
    config.model.path = str(base)
    config.model.lora = LoraConfig(rank=4, alpha=12.0, path=str(folder))
    for name, value in settings.items():
        setattr(config.model.lora, name, value)
    return adapter_problems(config, MODEL)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "model"


OTHER = "base_model.model.model.layers.0.self_attn"
WRONG = {
    "rank": ({"r": 8}, {}, r"its rank is 8, not model.lora.rank=4; set model.lora.rank=8"),
    "alpha": ({"lora_alpha": 8}, {}, r"its alpha is 8, not model.lora.alpha=12; set"),
    "dora": ({"use_dora": True}, {}, r"its use_dora=true is not trained, only false is"),
    "rslora": ({"use_rslora": True}, {}, r"its use_rslora=true"),
    "bias": ({"bias": "all"}, {}, r'its bias="all" is not trained, only "none" is'),
    "whole modules": ({"modules_to_save": ["lm_head"]}, {}, r'its modules_to_save=\["lm_head"\]'),
    "ranks by layer": ({"rank_pattern": {"q_proj": 8}}, {}, r"its rank_pattern="),
    "another method": ({"peft_type": "IA3"}, {}, r'its peft_type="IA3"'),
    "another start": (
        {"init_lora_weights": "pissa_niter_4"},
        {},
        r"its init_lora_weights=pissa_niter_4 took",
    ),
    "another model": (
        {"base_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"},
        {},
        r"it belongs to Qwen/Qwen2.5-7B-Instruct, not to model.path=\S+/model; name that model, or",
    ),
    "fused names": (
        {},
        {f"{OTHER}.qkv_proj.lora_A.weight": (4, 32), "transformer.h.0.attn.lora_A": (4, 32)},
        r"its tensor transformer.h.0.attn.lora_A is not named as PEFT",
    ),
    "magnitudes": (
        {},
        {f"{OTHER}.q_proj.lora_magnitude_vector": (32,)},
        r"its tensor \S+magnitude_vector is",
    ),
    "fused module": (
        {},
        {f"{OTHER}.qkv_proj.lora_A.weight": (4, 32)},
        r"it adapts \S+.*qkv_proj.*; no model",
    ),
    "another shape": (
        {},
        {f"{OTHER}.q_proj.lora_A.weight": (4, 64)},
        r"q_proj.lora_A.weight is \(4, 64\), the model's is \(4, 32\); it belongs to a model of",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_is_not_this_runs_is_refused_in_one_line(
    case: str, base: Path, tmp_path: Path
) -> None:
    """Each names what is wrong with the directory, where, and how to mend it."""
    settings, tensors, text = WRONG[case]
    folder = write(tmp_path / "adapter", tensors_of() | tensors, **settings)
    (line,) = found(folder, base)
    assert line.startswith(f"model.lora.path={folder}: ") and "\n" not in line
    assert re.search(text, line)


def test_an_adapter_of_this_run_is_taken(base: Path, tmp_path: Path) -> None:
    """By the path of its model, by its name, and by a folder of the hub's cache; with the same tokenizer."""
    folder = write(tmp_path / "adapter", tensors_of())
    assert not found(folder, base)
    cached = tmp_path / "models--Some--Model" / "snapshots" / ("a" * 40)
    cached.mkdir(parents=True)
    for theirs, ours in (("Some/Model", cached), ("Some/Model@main", cached), (str(cached), base)):
        write(tmp_path / "adapter", tensors_of(), base_model_name_or_path=theirs)
        assert not found(folder, ours)
    write(tmp_path / "adapter", tensors_of())
    (base / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "truncation": null}')
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "truncation": {"max_length": 3}}')
    assert not found(folder, base)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    assert "its tokenizer.json has other tokens than that of model.path=" in found(folder, base)[0]


def test_layers_and_files_that_do_not_fit(base: Path, tmp_path: Path) -> None:
    """Targets, the number of layers, files of other kinds, a checkpoint's folder in the place of its hf/."""
    folder = write(tmp_path / "adapter", tensors_of(LoraConfig(rank=4, targets="attention")))
    assert "; set model.lora.targets=attention" in found(folder, base)[0]
    assert not found(folder, base, targets="attention")
    write(folder, tensors_of(layers=3))
    assert "layers.2" in found(folder, base)[0]
    (folder / ADAPTER_FILE).write_bytes(b"\x10")
    assert "is damaged or cut off" in found(folder, base)[0]
    (folder / ADAPTER_FILE).rename(folder / "adapter_model.bin")
    assert "no adapter_model.safetensors there; save the adapter anew with PEFT" in found(folder, base)[0]
    write(folder, tensors_of()).rename(tmp_path / "hf")
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "hf").rename(tmp_path / "step_000004" / "hf")
    assert (
        f"its adapter is model.lora.path={tmp_path / 'step_000004/hf'}"
        in found(tmp_path / "step_000004", base)[0]
    )
    assert found(folder, base, rank=0) == [
        f"model.lora.path={folder} does nothing while model.lora.rank=0; set model.lora.rank too, to the "
        "adapter's"
    ]


def test_a_mixture_of_experts_has_no_adapter() -> None:
    """Refused in one line, until it is right."""
    config = load_config(["experiment=node_8gpu_30b_a3b", "dry_run=true"])
    config.model.lora.rank = 16
    assert problems(config) == [
        "model.lora.rank=16: a mixture of experts is trained whole; set it to 0, or use a dense model"
    ]


@pytest.mark.parametrize(
    ("name", "share"), [("Qwen2.5-0.5B", 0.03), ("Qwen2.5-7B", 0.006), ("Qwen2.5-72B", 0.003)]
)
def test_a_publication_is_the_adapter_alone(name: str, share: float) -> None:
    """At rank 16 it has at most so much of the model's bytes: those of the tensors by their names."""
    words = [f"model.path={name}", "model.dtype=bfloat16", "model.lora.rank=16", "dry_run=true"]
    config = load_config(["experiment=one_gpu", *words])
    derived, model = derive(config), known_models()[name]
    tensors = adapter_tensors(widths_of(model), model["num_hidden_layers"], config.model.lora)
    assert derived.publish_bytes == 2 * sum(rows * columns for _, (rows, columns) in tensors)
    assert derived.publish_bytes < share * 2 * count_parameters(model)
    said = derived_values(config, derived)["adapter"]
    assert said.startswith(
        f"rank 16, alpha 32, of attention and mlp: {derived.publish_bytes // 2:,} parameters, "
    )
    assert derived.slot_bytes == derived.publish_bytes * slots_of(config)


def test_a_frozen_model_needs_its_weights_alone() -> None:
    """18 bytes of each of the adapter's parameters, 2 of the model's, and no gradient of the head; of the
    adapter a tensor-parallel rank has all that is not split."""
    words = ["experiment=node_8gpu_7b", "trainer.tokens_per_microbatch=64", "dry_run=true"]
    words += ["sampling.max_response_tokens=32", "trainer.distributed_optimizer=false"]
    config = load_config([*words, "model.lora.rank=16", "trainer.recompute_activations=full"])
    model = model_config(config.model.path, True)
    each = [p.parameters(16, 4) for p in widths_of(model).projections("all")]
    q, k, *_ = each
    assert (
        q == 16 * (3584 + 3584 // 4) and k == 16 * (3584 + 512 // 4) and each[-1] == 16 * (18944 // 4 + 3584)
    )
    assert derive(config).trainer_gpu_memory_bytes == pytest.approx(
        2 * count_parameters(model) / 4 + 18 * 28 * sum(each), rel=0.06
    )


def test_layouts_of_config_and_shape_agree(base: Path) -> None:
    """What the trainer adapts is what the checks know."""
    assert adapted(read_shape(base), LORA) == widths_of(MODEL).projections(LORA.targets)


def test_an_adapter_in_the_place_of_a_model_is_told_apart(base: Path, tmp_path: Path) -> None:
    """model.path with the directory of an adapter, or with a checkpoint that has one."""
    folder = write(tmp_path / "hf", tensors_of())
    for named in (folder, tmp_path):
        with pytest.raises(LaminarError, match=f"this is an adapter: .* as model.lora.path={folder}$"):
            model_config(str(named))
