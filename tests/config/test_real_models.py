"""What the config.json of a released dense model means before a run: parameters, positions, windows, heads,
and what SGLang is told."""

import json

import pytest
import torch

from laminar_hpc.config.check import check
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import count_parameters, head_size
from laminar_hpc.config.rope import YarnScaling, positions
from laminar_hpc.config.windows import windows_of
from laminar_hpc.engine.sglang.overrides import overrides
from laminar_hpc.machine.compat.torchvision import declare_schemas
from laminar_hpc.weights.hf import read_shape

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GLM4 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
# what counts of the config.json on the hub; of YaRN with the entries that the model cards say to add
REAL = {
    "gemma-3-1b-it": GEMMA3,
    "GLM-4-9B-0414": GLM4,
    "GLM-4-32B-0414 with YaRN": GLM4
    | {
        "attention_bias": False,
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "num_attention_heads": 48,
        "num_hidden_layers": 61,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "Mistral-7B-Instruct-v0.3": MISTRAL,
    "Mistral-7B-v0.1": MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "Mistral-Nemo-Instruct-2407": MISTRAL
    | {
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 40,
        "vocab_size": 131072,
    },
    "Qwen2.5-7B-Instruct": QWEN2,
    "Qwen2.5-7B-Instruct with YaRN": QWEN2
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen2.5-7B-Instruct-1M": QWEN2
    | {
        "dual_chunk_attention_config": {
            "chunk_size": 262144,
            "local_size": 8192,
            "original_max_position_embeddings": 262144,
        },
        "max_position_embeddings": 1010000,
        "rope_theta": 10000000.0,
        "sliding_window": 32768,
    },
    "Qwen3-8B with YaRN": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
# parameters as the hub gives them, positions, width of a head, tokens of a window
MEANT = {
    "gemma-3-1b-it": (999_885_952, 32768, 256, 512),
    "GLM-4-9B-0414": (9_400_279_040, 32768, 128, None),
    "GLM-4-32B-0414 with YaRN": (32_566_081_536, 131072, 128, None),
    "Mistral-7B-Instruct-v0.3": (7_248_023_552, 32768, 128, None),
    "Mistral-7B-v0.1": (7_241_732_096, 32768, 128, 4096),
    "Mistral-Nemo-Instruct-2407": (12_247_782_400, 131072, 128, None),
    "Qwen2.5-7B-Instruct": (7_615_616_512, 32768, 128, None),
    "Qwen2.5-7B-Instruct with YaRN": (7_615_616_512, 131072, 128, None),
    "Qwen2.5-7B-Instruct-1M": (7_615_616_512, 253952, 128, None),
    "Qwen3-8B with YaRN": (8_190_735_360, 131072, 128, None),
}


@pytest.mark.parametrize("name", REAL)
def test_a_released_model_is_what_it_is(name, tmp_path):
    """Parameters are transformers' own number, and the hub's; YaRN has four times the original positions, and
    attention by chunks the first chunk's."""
    declare_schemas()
    import transformers

    model = REAL[name]
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    parameters, longest, head, window = MEANT[name]
    assert count_parameters(model) == sum(p.numel() for p in real.parameters()) == parameters
    shape, windows = read_shape(tmp_path), windows_of(model)
    assert (shape.head_dim, head_size(model), shape.max_positions) == (head, head, longest)
    assert shape.windows == windows and (windows.size if windows else None) == window
    assert shape.norm_eps == config.rms_norm_eps
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert shape.rope_theta == rope["rope_theta"] and shape.tied == config.tie_word_embeddings


def test_gemma_says_of_each_layer_what_it_attends_to():
    """Five of six layers of gemma-3-1b-it have a window and a RoPE of their own, by the config.json of the
    hub and by that which transformers 5 writes."""
    declare_schemas()
    import transformers

    windows = windows_of(GEMMA3)
    assert windows.layers == ((True,) * 5 + (False,)) * 4 + (True, True) and windows.rope_theta == 10000.0
    written = transformers.Gemma3TextConfig(**GEMMA3).to_dict()
    assert written["rope_parameters"].keys() == {"sliding_attention", "full_attention"}
    del written["sliding_window_pattern"]
    assert windows_of(written) == windows
    assert count_parameters(written) == count_parameters(GEMMA3)


def test_sglang_is_told_of_yarn():
    """More positions than max_position_embeddings, and the attention factor as a multiple of SGLang's own."""
    model = REAL["Qwen3-8B with YaRN"]
    assert read_overrides(model) == {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
            "attn_factor": 1.0,
        },
    }
    own = YarnScaling(4.0, 32768, 0.5)
    changed = model | {"rope_scaling": model["rope_scaling"] | {"attention_factor": own.attention_factor}}
    assert read_overrides(changed)["rope_parameters"]["attn_factor"] == pytest.approx(0.5 / 1.138629436)
    assert read_overrides(REAL["Qwen2.5-7B-Instruct-1M"]) == {"max_position_embeddings": 253952}
    assert read_overrides(REAL["Mistral-7B-v0.1"]) == {}


def read_overrides(model: dict) -> dict:
    found = overrides(model)
    return json.loads(found["json-model-override-args"]) if found else {}


def test_a_run_may_use_all_positions_of_yarn(tmp_path):
    """Promise: a dry run knows how many there are, and of plain RoPE how few."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    words = [f"model.path={tmp_path}", f"data.train={data}", "reward.function=operator.add", "dry_run=true"]
    words += ["sampling.max_response_tokens=100000", "trainer.tokens_per_microbatch=131072"]
    words += ["rollout.kv_cache_tokens=131072"]
    (tmp_path / "config.json").write_text(json.dumps(REAL["Qwen2.5-7B-Instruct with YaRN"]))
    check(load_config(words))
    (tmp_path / "config.json").write_text(json.dumps(REAL["Qwen2.5-7B-Instruct"]))
    with pytest.raises(LaminarError, match="leave room for a prompt in the model's 32768 positions"):
        check(load_config(words))


def test_what_transformers_takes_where_a_config_is_silent():
    """Mistral's window of 4096 tokens; original positions of YaRN are max_position_embeddings."""
    bare = {"model_type": "mistral", "num_hidden_layers": 2}
    assert windows_of(bare).size == 4096 and windows_of(bare | {"sliding_window": None}) is None
    assert windows_of(QWEN2 | {"sliding_window": 4096}) is None
    assert positions(QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 2}}) == 65536
