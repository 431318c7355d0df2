"""Mixtures of experts: what a config.json says of them, how many parameters they have, and how they lie on
trainer ranks. Imports no torch.

Each token goes to `per_token` of a layer's `count` experts; the router weighs them by a softmax over all
experts, whose chosen weights are made to sum to 1 where `normalized`. The auxiliary losses that pretraining
balances experts with (router_aux_loss_coef) are not part of any objective here.
"""

from dataclasses import dataclass

from laminar_hpc.config.system_schema import TrainerConfig

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")  # model_type of those that are trained
# An expert-parallel rank gets more tokens than its share, as routers are uneven: a largest load of 1.5 times
# the mean is usual with 8 or more experts on a rank (OLMoE, arXiv 2409.02060, section 5).
_UNEVEN = 1.5


@dataclass(frozen=True)
class Experts:
    """Of each layer. `width`: an expert's feed-forward width; `shared_width`: that of the expert which every
    token uses, with a gate of its own, 0 where there is none."""

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int

    def layer_parameters(self, hidden: int) -> int:
        """Router, experts, and the shared expert with its gate."""
        shared = 3 * hidden * self.shared_width + hidden if self.shared_width else 0
        return self.routed_parameters(hidden) + hidden * self.count + shared

    def routed_parameters(self, hidden: int) -> int:
        """The experts that the router chooses from, in one layer."""
        return 3 * hidden * self.width * self.count

    def idle_parameters(self, hidden: int) -> int:
        """Of a layer's experts, those that a token does not go to."""
        return 3 * hidden * self.width * (self.count - self.per_token)


def experts_of(model: dict) -> Experts | None:
    """From a config.json; None for a dense model, and for one of a family that is not trained. What is left
    out stands for what transformers takes then."""
    family = model.get("model_type")
    if family not in FAMILIES:
        return None
    count = model.get("num_local_experts", model.get("num_experts"))  # transformers 5 | 4
    if family == "mixtral":
        return Experts(
            8 if count is None else count,
            model.get("num_experts_per_tok", 2),
            model["intermediate_size"],
            True,
            0,
        )
    qwen3 = family == "qwen3_moe"
    return Experts(
        count=(128 if qwen3 else 60) if count is None else count,
        per_token=model.get("num_experts_per_tok", 8 if qwen3 else 4),
        width=model.get("moe_intermediate_size", 768 if qwen3 else 1408),
        normalized=bool(model.get("norm_topk_prob", False)),
        shared_width=0 if qwen3 else model.get("shared_expert_intermediate_size", 5632),
    )


def objection(model: dict) -> str:
    """What is wrong with the experts of a config.json, in a sentence; "" if nothing is."""
    if (experts := experts_of(model)) is None:
        return ""
    sizes = {
        "num_local_experts" if model["model_type"] == "mixtral" else "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
    }
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name}={value!r} is not a number of 1 or more; download the model again"
    if experts.per_token > experts.count:
        return f"num_experts_per_tok={experts.per_token} of {experts.count} experts; download the model again"
    if experts.per_token == 1 and experts.normalized:
        return (
            "norm_topk_prob=true with num_experts_per_tok=1 makes every weight 1, so the router would never "
            "learn; use a model with more experts per token"
        )
    if model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) != 1:
        return (
            "mlp_only_layers and decoder_sparse_step leave layers without experts, which SGLang's model does "
            "not; use a model with experts in every layer"
        )
    return ""


def expert_shards(trainer: TrainerConfig) -> int:
    """Trainer ranks of a pipeline stage over which a layer's experts are divided: whole experts with
    trainer.expert_parallel, else parts of each, as all other layers."""
    return trainer.expert_parallel if trainer.expert_parallel > 1 else trainer.tensor_parallel


def expert_replicas(trainer: TrainerConfig) -> int:
    """Trainer ranks of a pipeline stage that hold the same experts."""
    return trainer.ranks // trainer.pipeline_parallel // expert_shards(trainer)


def routed_activations(experts: Experts, hidden: int, width: int) -> float:
    """Bytes that a layer's experts keep of a token: for each expert that it goes to four values of the
    expert's width, its input and its output. `width`: bytes of a value."""
    routed = experts.per_token * (4 * experts.width + 2 * hidden) * _UNEVEN
    return width * (routed + 4 * experts.shared_width)


def experts_text(model: dict) -> str:
    """What a run does with a model's experts; "" for a dense one."""
    if (experts := experts_of(model)) is None:
        return ""
    shared = f" and one shared of {experts.shared_width}" if experts.shared_width else ""
    weights = "weights sum to 1" if experts.normalized else "the softmax's weights"
    return (
        f"{experts.per_token} of {experts.count} of width {experts.width}{shared} per token, {weights}; "
        "router in float32; no auxiliary loss"
    )
