"""The model families that are trained, and what a config.json leaves out of its family. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """`architecture`: the class of transformers and of SGLang."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json names none; None: hidden / heads
    # of tensors: the block with the experts, and an expert's gate, up and down projection
    expert_names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")


FAMILIES = {  # by config.json's model_type
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qkv_bias=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, head_dim=128),
    "mixtral": Family("MixtralForCausalLM", expert_names=("block_sparse_moe", "w1", "w3", "w2")),
}


def family_of(model: dict) -> Family:
    """Of a config.json; Llama for a family that is not trained."""
    return FAMILIES.get(model.get("model_type", "qwen2"), FAMILIES["llama"])
