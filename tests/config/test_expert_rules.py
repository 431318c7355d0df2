"""What a config.json with experts means before a run: parameters, memory, and one line for what cannot be."""

import json
from dataclasses import replace

import pytest
import torch

from laminar_hpc.config.check import check, derived_values, warnings
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.experts import experts_of
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import count_parameters, model_config, trainer_bytes
from laminar_hpc.config.routing import RouteShape, replayed_routes
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.engine.sglang.command_line import refused_arguments
from laminar_hpc.machine.compat.torchvision import declare_schemas

# what counts of the config.json on the hub
REAL = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}
REAL["Qwen3-235B-A22B"] = REAL["Qwen3-30B-A3B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
REAL["Qwen2-57B-A14B"] = REAL["Qwen1.5-MoE-A2.7B"] | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
}
# parameters as the hub gives them
PARAMETERS = {
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
}


@pytest.fixture
def words(tmp_path) -> list[str]:
    model = REAL["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps(model))
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return [f"model.path={tmp_path}", f"data.train={data}", "reward.function=operator.add", "dry_run=true"]


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_those_of_transformers(name):
    """Router, experts, shared expert and its gate are counted: transformers' own number, and the hub's."""
    declare_schemas()
    import transformers

    shape = REAL[name]
    family = shape["architectures"][0]
    config = getattr(transformers, family.replace("ForCausalLM", "Config"))
    with torch.device("meta"):
        real = getattr(transformers, family)(
            config(**{k: v for k, v in shape.items() if k != "architectures"})
        )
    assert count_parameters(shape) == sum(p.numel() for p in real.parameters())
    assert count_parameters(shape) == PARAMETERS.get(name, count_parameters(shape))


def test_both_generations_of_transformers_name_the_experts():
    """num_experts in transformers 4, num_local_experts in 5; what is left out is transformers' default."""
    shape = dict(REAL["Qwen3-30B-A3B"])
    old = experts_of(shape)
    shape["num_local_experts"] = shape.pop("num_experts")
    assert experts_of(shape) == old and old.normalized
    bare = experts_of({"model_type": "qwen3_moe"})
    assert (bare.count, bare.per_token, bare.width, bare.normalized) == (128, 8, 768, False)


def test_memory_of_experts_is_divided_over_their_ranks():
    """State of a rank: 18 bytes of each parameter, dense ones over the tensor-parallel ranks and experts over
    the expert-parallel ranks; the distributed optimizer divides each over its replicas."""
    shape = REAL["Qwen3-30B-A3B"]
    routed = 48 * 128 * 3 * 2048 * 768
    dense = count_parameters(shape) - routed
    one = TrainerConfig(tokens_per_microbatch=1)
    assert trainer_bytes(shape, 2, one) == pytest.approx(18 * (dense + routed), rel=1e-3)
    split = replace(one, tensor_parallel=4)
    assert trainer_bytes(shape, 2, split) == pytest.approx(18 * (dense + routed) / 4, rel=1e-3)
    whole = replace(split, data_parallel=2, expert_parallel=8)
    assert trainer_bytes(shape, 2, whole) == pytest.approx(18 * (dense / 4 + routed / 8), rel=1e-3)
    shared = replace(whole, data_parallel=4, distributed_optimizer=True)
    expected = dense / 4 * (6 + 12 / 4) + routed / 8 * (6 + 12 / 2)
    assert trainer_bytes(shape, 2, shared) == pytest.approx(expected, rel=1e-3)
    long = replace(whole, tokens_per_microbatch=4096)
    none, selective = (
        trainer_bytes(shape, 2, replace(long, recompute_activations=choice))
        for choice in ("none", "selective")
    )
    of_token = 1.5 * 8 * 2 * (4 * 768 + 2 * 2048) + 2 * 2048  # bytes in a layer: 8 experts, and a norm
    assert none - selective == pytest.approx(4096 * 48 * of_token / 4, rel=1e-3)


def test_a_run_says_what_it_does_with_experts(words):
    """Auxiliary losses are off, and the block of derived quantities says so."""
    config = load_config([*words, "model.dtype=bfloat16"])
    text = derived_values(config, check(config))["experts"]
    assert text == ("8 of 128 of width 768 per token, weights sum to 1; router in float32; no auxiliary loss")


def test_routes_are_replayed_of_experts_in_bfloat16(words):
    """auto: of experts in bfloat16, by a real engine, in a run that generates; true and false say it. A route
    is a byte per layer and expert of a token up to 256 experts, else two."""

    def shape_of(*more: str) -> RouteShape | None:
        config = load_config([*words, *more])
        return replayed_routes(config, model_config(config.model.path))

    half = "model.dtype=bfloat16"
    found = shape_of(half)
    assert found is not None and (found.layers, found.per_token) == (tuple(range(48)), 8)
    assert (found.dtype, found.token_bytes) == ("uint8", 384)
    assert replace(found, experts=257).dtype == "int16" and replace(found, experts=257).token_bytes == 768
    assert shape_of() is None and shape_of(half, "algorithm.routing_replay=false") is None
    assert shape_of("algorithm.routing_replay=true") == found
    assert shape_of(half, "rollout.engine=emulated") is None


def test_a_dry_run_says_what_routes_come_to(words, tmp_path):
    """Bytes of a token, their share of what is read and written, and the engine's memory; a step of many
    gigabytes is warned of, with the cure."""
    model = REAL["Qwen3-235B-A22B"]
    (tmp_path / "config.json").write_text(json.dumps(model))
    more = ["model.dtype=bfloat16", "rollout.kv_cache_tokens=1000000"]
    config = load_config([*words, *more])
    derived = check(config)
    assert derived_values(config, derived)["routing_replay"] == (
        "94 layers x 8: 752 bytes a token, 99% of the data plane; 3.01 GB of an engine's host memory"
    )
    assert not [line for line in warnings(config, derived) if "routing_replay" in line]
    many = ["algorithm.prompts_per_step=512", "sampling.max_response_tokens=32000"]
    more.append("trainer.tokens_per_microbatch=40000")
    config = load_config([*words, *more, *many])
    [line] = [line for line in warnings(config, check(config)) if "routing_replay" in line]
    assert "about 12 GB of routes in a step, 752 bytes of each token" in line
    assert line.endswith("or set algorithm.routing_replay=false")
    config.algorithm.routing_replay = "false"
    assert "routing_replay" not in derived_values(config, derived)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("enable-hierarchical-cache=true", "KV that comes back from elsewhere has no routes"),
        ("chunked-prefill-size=-1", "room for the routes of one chunk of a prefill"),
    ],
)
def test_engines_that_would_lose_routes_are_refused(words, tmp_path, word, says):
    """Where responses bring them; a dense model's engine may have both."""
    given = [*words, "model.dtype=bfloat16", f"rollout.engine_arguments.{word}"]
    [line] = refused_arguments(load_config(given))
    assert says in line and "set algorithm.routing_replay=false" in line
    assert not refused_arguments(load_config([*given, "algorithm.routing_replay=false"]))
    dense = REAL["Qwen3-30B-A3B"] | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    assert not refused_arguments(load_config(given))


REFUSED = [
    ({"mlp_only_layers": [0]}, "", "mlp_only_layers and decoder_sparse_step leave layers without experts"),
    ({"decoder_sparse_step": 2}, "", "use a model with experts in every layer"),
    ({"num_experts_per_tok": 1}, "", "the router would never learn"),
    ({"num_experts_per_tok": 200}, "", "num_experts_per_tok=200 of 128 experts"),
    ({"num_experts": "many"}, "", "num_experts='many' is not a number of 1 or more"),
    ({}, "trainer.expert_parallel=3", "trainer.expert_parallel=3 does not divide the model's 128 experts"),
    (
        {},
        "trainer.expert_parallel=8 trainer.data_parallel=2 trainer.tensor_parallel=2",
        "expert_parallel=8 does not divide trainer.tensor_parallel=2 x trainer.data_parallel=2",
    ),
    (
        {"moe_intermediate_size": 770},
        "trainer.tensor_parallel=4",
        "does not divide an expert's width of 770; raise trainer.expert_parallel",
    ),
    ({}, "rollout.expert_parallel=2", "rollout.expert_parallel=2 does not divide rollout.tensor_parallel=1"),
    (
        {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
        | {"shared_expert_intermediate_size": 30},
        "rollout.tensor_parallel=4",
        "rollout.tensor_parallel=4 does not divide the shared expert's width of 30",
    ),
    (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "trainer.expert_parallel=2",
        "trainer.expert_parallel=2: the model has no experts; leave it at 1",
    ),
    (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        "algorithm.routing_replay=true",
        "routing_replay=true: the model has no experts; leave it at auto",
    ),
]


@pytest.mark.parametrize(("changes", "more", "says"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(words, tmp_path, changes, more, says):
    """Before anything starts, with the cure."""
    (tmp_path / "config.json").write_text(json.dumps(REAL["Qwen3-30B-A3B"] | changes))
    with pytest.raises(LaminarError, match=says) as error:
        check(load_config([*words, *more.split()]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 320
