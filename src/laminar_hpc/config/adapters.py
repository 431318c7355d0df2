"""Low-rank adapters (LoRA): which linear layers have one, and how many parameters that makes. Imports no
torch.

Beside a layer that maps x [inputs] to W x [outputs] there are A [rank, inputs] and B [outputs, rank]; with
them it gives W x + alpha / rank * B A x (Hu et al., arXiv 2106.09685, section 4.1). PEFT has an A of its own
for each of the layers that Megatron computes as one: q, k and v, and gate and up.
"""

from dataclasses import dataclass
from typing import NamedTuple

from laminar_hpc.config.models import count_parameters, head_size, kv_heads, stage_layers
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.config.system_schema import TrainerConfig

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."  # of the names of tensors, before those that Hugging Face has
TARGETS = {  # a layer's modules, by PEFT's names
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
TARGETS["all"] = TARGETS["attention"] + TARGETS["mlp"]
_SPLIT_INPUTS = ("o_proj", "down_proj")  # over tensor-parallel ranks; of the others the outputs are


class Projection(NamedTuple):
    """A linear layer that has an adapter, within a decoder layer, as `self_attn.q_proj`."""

    module: str
    inputs: int
    outputs: int

    def parameters(self, rank: int, tensor_parallel: int = 1) -> int:
        """Of its adapter, on each of so many tensor-parallel ranks: what is not split each of them has."""
        own = self.inputs, self.outputs // tensor_parallel
        if self.module.endswith(_SPLIT_INPUTS):
            own = self.inputs // tensor_parallel, self.outputs
        return rank * sum(own)


@dataclass(frozen=True)
class Widths:
    """What the sizes of a dense decoder layer's linear layers follow from."""

    hidden: int
    queries: int
    keys: int
    feed_forward: int

    def projections(self, targets: str) -> list[Projection]:
        """The layers that model.lora.targets names, in the order of a Hugging Face state dict."""
        hidden, queries, keys, feed_forward = self.hidden, self.queries, self.keys, self.feed_forward
        every = [
            Projection("self_attn.q_proj", hidden, queries),
            Projection("self_attn.k_proj", hidden, keys),
            Projection("self_attn.v_proj", hidden, keys),
            Projection("self_attn.o_proj", queries, hidden),
            Projection("mlp.gate_proj", hidden, feed_forward),
            Projection("mlp.up_proj", hidden, feed_forward),
            Projection("mlp.down_proj", feed_forward, hidden),
        ]
        return [each for each in every if each.module.partition(".")[2] in TARGETS[targets]]


def widths_of(model: dict) -> Widths:
    """From a config.json."""
    head = head_size(model)
    queries, keys = model["num_attention_heads"] * head, kv_heads(model) * head
    return Widths(model["hidden_size"], queries, keys, model["intermediate_size"])


def adapter_name(layer: int, module: str, half: str) -> str:
    """By PEFT's names the tensor `half` ("A" or "B") of a module, as `self_attn.q_proj`, of decoder layer
    number `layer`."""
    return f"{ADAPTER_PREFIX}model.layers.{layer}.{module}.lora_{half}.weight"


def adapter_tensors(widths: Widths, layers: int, lora: LoraConfig) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of each tensor: of each module A [rank, inputs] and B [outputs, rank], by layers."""
    return [
        (adapter_name(layer, each.module, half), size)
        for layer in range(layers)
        for each in widths.projections(lora.targets)
        for half, size in (("A", (lora.rank, each.inputs)), ("B", (each.outputs, lora.rank)))
    ]


def published_parameters(model: dict, lora: LoraConfig) -> int:
    """Parameters of a publication: those of the adapter alone, or without one of the whole model."""
    if lora.rank == 0:
        return count_parameters(model)
    return model["num_hidden_layers"] * _of_layer(model, lora, 1)


def adapter_text(model: dict, lora: LoraConfig) -> str:
    """What a run trains in place of the model's weights; "" where it trains these."""
    if lora.rank == 0:
        return ""
    parameters, whole = published_parameters(model, lora), count_parameters(model)
    layers = " and ".join(["attention", "mlp"] if lora.targets == "all" else [lora.targets])
    return (
        f"rank {lora.rank}, alpha {lora.alpha:g}, of {layers}: {parameters:,} parameters, "
        f"{parameters / whole:.2%} of the model's"
    )


def rank_adapter_parameters(model: dict, lora: LoraConfig, trainer: TrainerConfig) -> int:
    """Parameters of the adapter on a rank of the fullest pipeline stage; 0 without one."""
    if lora.rank == 0:
        return 0
    return max(stage_layers(model, trainer.pipeline_parallel)) * _of_layer(
        model, lora, trainer.tensor_parallel
    )


def _of_layer(model: dict, lora: LoraConfig, tensor_parallel: int) -> int:
    projections = widths_of(model).projections(lora.targets)
    return sum(each.parameters(lora.rank, tensor_parallel) for each in projections)
