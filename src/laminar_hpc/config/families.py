"""The model families that are trained, and what a config.json leaves out of its family. Imports no torch."""

from dataclasses import dataclass

# A layer's norms, by what they are named and where they stand, in the order of a state dict.
NORMS = (("input_layernorm", "before_attention"), ("post_attention_layernorm", "before_mlp"))


@dataclass(frozen=True)
class Family:
    """`architecture`: the class of transformers and of SGLang."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    # config.json's attention_bias is a bias of queries, keys and values, without which there is one
    bias_by_config: bool = False
    head_dim: int | None = None  # where config.json names none; None: hidden / heads
    rotated: float = 1.0  # share of a head that RoPE turns where config.json names none
    interleaved: bool = False  # RoPE turns dimensions 2i and 2i + 1 of a head, not i and i + half
    scaled_rope: bool = True  # SGLang's class scales RoPE as config.json says
    fused_mlp: bool = False  # gate and up projection are one tensor, gate_up_proj
    norms: tuple[tuple[str, str], ...] = NORMS
    centered_norms: bool = False  # a norm's weight is what its factor has beyond 1
    activation: str = "silu"
    scaled_embedding: bool = False  # by the square root of the hidden size
    tied: bool = False  # where config.json does not say tie_word_embeddings
    # of tensors: the block with the experts, and an expert's gate, up and down projection
    expert_names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")


FAMILIES = {  # by config.json's model_type
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        qk_norm=True,
        head_dim=256,
        scaled_rope=False,
        norms=(
            ("input_layernorm", "before_attention"),
            ("post_attention_layernorm", "after_attention"),
            ("pre_feedforward_layernorm", "before_mlp"),
            ("post_feedforward_layernorm", "after_mlp"),
        ),
        centered_norms=True,
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        tied=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        bias_by_config=True,
        head_dim=128,
        rotated=0.5,
        interleaved=True,
        fused_mlp=True,
        norms=(
            *NORMS,
            ("post_self_attn_layernorm", "after_attention"),
            ("post_mlp_layernorm", "after_mlp"),
        ),
    ),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qkv_bias=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, head_dim=128),
    "mixtral": Family(
        "MixtralForCausalLM",
        scaled_rope=False,
        expert_names=("block_sparse_moe", "w1", "w3", "w2"),
    ),
}


def is_tied(model: dict) -> bool:
    """Whether the head of a config.json is its embedding."""
    return bool(model.get("tie_word_embeddings", family_of(model).tied))


def has_qkv_bias(model: dict) -> bool:
    """Whether queries, keys and values of a config.json have biases."""
    family = family_of(model)
    return family.qkv_bias or (family.bias_by_config and bool(model.get("attention_bias", True)))


def family_of(model: dict) -> Family:
    """Of a config.json; Llama for a family that is not trained."""
    return FAMILIES.get(model.get("model_type", "qwen2"), FAMILIES["llama"])
