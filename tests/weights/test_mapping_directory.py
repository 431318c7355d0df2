"""Hugging Face directories: what is read of config.json, sharded safetensors, and a directory written
back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rope import Llama3Scaling
from laminar_hpc.weights.hf import TensorReader, copy_side_files, read_shape, safetensors_parts

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def write(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}],
    ids=["v4", "v5"],
)
def test_config_of_both_transformers_generations(rope: dict, tmp_path: Path) -> None:
    """rope_theta stands at the top in transformers 4, in rope_parameters in transformers 5."""
    shape = read_shape(write(tmp_path, **rope))
    assert (shape.rope_theta, shape.head_dim, shape.kv_heads, shape.tied) == (1e6, 8, 2, True)


def test_what_families_leave_out_of_their_config(tmp_path: Path) -> None:
    """Qwen3's heads are of 128 where its config.json is silent, whatever hidden and heads are; Llama's
    original context is its own."""
    assert (
        read_shape(write(tmp_path, model_type="qwen3")).head_dim == 128
        and read_shape(write(tmp_path, model_type="llama")).head_dim == 8
    )
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 99,
    }
    shape = read_shape(write(tmp_path, model_type="llama", rope_scaling=rope, rope_theta=5e5))
    assert shape.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 99) and shape.rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "gpt2"},
            "model_type gpt2 is not supported; supported: .*llama, mistral, mixtral, qwen2, .*, qwen3",
        ),
        ({"model_type": "deepseek_v3"}, "model_type deepseek_v3 is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "RoPE of type longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "RoPE of type dynamic"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn without 'factor'"),
        (
            {"model_type": "qwen3_moe", "dual_chunk_attention_config": {"chunk_size": 9}},
            "attention by chunks is supported with qwen2 only",
        ),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "soft caps of logits"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attention to later tokens"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "other than gelu_pytorch_tanh are not"),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "SGLang's Gemma3ForCausalLM is for plain RoPE",
        ),
        (
            {"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 2}},
            "SGLang's MixtralForCausalLM is for plain RoPE",
        ),
        (
            {
                "model_type": "glm4",
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"partial_rotary_factor": 0.25},
            },
            "partial_rotary_factor=0.25 is not what config.json says of it elsewhere",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "RoPE with factor=0.5, which is no number of 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "llama3 without 'low_freq_factor'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias and mlp_bias are not supported"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "m.Own"}}, r"auto_map names code .*AutoModelForCausalLM"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 splits"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict, words: str, tmp_path: Path) -> None:
    """A model that would be computed wrongly is refused in one line."""
    with pytest.raises(LaminarError, match=words):
        read_shape(write(tmp_path, **changes))


def test_sharded_directories_are_read_by_their_index(tmp_path: Path) -> None:
    """Slices come from the file that holds them; a missing file is named."""
    first, second = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    save_file({"a": first}, tmp_path / "model-1.safetensors")
    save_file({"b": second}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with TensorReader(tmp_path) as tensors:
        assert tensors.names() == {"a", "b"} and tensors.shape("b") == (2, 3)
        assert torch.equal(tensors.narrow("a", 0, 1, 2), first[1:3]) and torch.equal(
            tensors.narrow("b", 1, 2, 1), second[:, 2:]
        )
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(LaminarError, match=r"model-2.safetensors is missing"):
        TensorReader(tmp_path)


def test_a_written_directory_names_the_dtype_that_it_holds(tmp_path: Path) -> None:
    """Served in bfloat16, so config.json says bfloat16; all other files are copied."""
    source = write(tmp_path, dtype="float32")
    (source / "tokenizer.json").write_text("{}")
    out, tensors = tmp_path / "out", [("a", torch.ones(2)), ("b", torch.arange(6.0).view(2, 3))]
    out.mkdir()
    parts = safetensors_parts([(name, tensor.bfloat16()) for name, tensor in tensors])
    (out / "model.safetensors").write_bytes(b"".join(parts))
    copy_side_files(source, out, torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**CONFIG, "dtype": "bfloat16"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in tensors)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
