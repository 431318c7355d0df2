"""What a low-rank adapter costs trainer and engines in place of all weights (LoRA, Hu et al., arXiv
2106.09685): counted, not fitted. Constants: constants.py.

A frozen matrix has no gradient of its own, so its backward pass is one product of each token, not two: of a
linear layer's 6 FLOPs per parameter and token 4 are left. An adapter's own products have `rank` rows or
columns, fewer than a GPU needs to be busy computing: they take as long as what they read and write, of which
every value is counted once for each product (trainer/megatron/adapters.py), or as their FLOPs where these
take longer. What the ranks reduce, what is published and what a replica pulls is the adapter alone.
"""

import dataclasses

from laminar_hpc.config.adapter_check import adapter_problems
from laminar_hpc.config.adapters import TARGETS, published_parameters, widths_of
from laminar_hpc.config.schema import LoraConfig, ModelConfig, RunConfig
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.cost import EngineCosts
from laminar_hpc.simulator.tables import Gpu, Model

_WIDTH = 2.0  # bytes of a bfloat16
_OF_LAYERS = ("overhead", "weights", "compute", "request", "prefill_token", "floor")  # of EngineCosts
_TOGETHER = (TARGETS["attention"][:3], ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def wrong_adapter(model: Model, lora: LoraConfig) -> list[str]:
    """Why a run would refuse it, one line each, by the names of the simulator's keys."""
    run = RunConfig(model=ModelConfig(path=model.path, lora=lora))
    return [line.replace("model.lora.", "lora.") for line in adapter_problems(run, model.config)]


def trained_part(model: Model, lora: LoraConfig) -> Model:
    """Of the model what is trained: all of it, or without its weights the adapter."""
    if lora.rank == 0:
        return model
    return dataclasses.replace(model, parameters=float(published_parameters(model.config, lora)))


def adapter_values(model: Model, lora: LoraConfig) -> tuple[float, float]:
    """Values that a token's forward pass through all adapters reads and writes in memory, and its backward
    pass, over all layers; those of width `rank` are left out.

    Modules that Megatron computes as one layer have one product with A, which reads the layer's input, and
    one with B, which reads its output and writes it anew. Backward both products with the output's gradient
    read it; of the input, it is read once, and its gradient is read and written."""
    forward = backward = 0.0
    modules = {
        each.module.partition(".")[2]: each for each in widths_of(model.config).projections(lora.targets)
    }
    for names in _TOGETHER:
        if layer := [modules[name] for name in names if name in modules]:
            inputs, outputs = layer[0].inputs, sum(each.outputs for each in layer)
            forward += inputs + 2 * outputs
            backward += 3 * inputs + 2 * outputs
    return model.layers * forward, model.layers * backward


def adapter_seconds(
    model: Model, gpu: Gpu, lora: LoraConfig, flops: float, c: Constants
) -> tuple[float, float]:
    """Seconds on one GPU of a token's forward pass through all adapters, and of its backward pass. `flops`:
    FLOP/s that wide products reach."""
    if lora.rank == 0:
        return 0.0, 0.0
    rate = c.decode_hbm_efficiency * gpu.hbm
    forward, backward = (_WIDTH * values / rate for values in adapter_values(model, lora))
    products = 2.0 * published_parameters(model.config, lora) / flops
    return max(forward, products), max(backward, 2.0 * products)


def serving_adapters(
    costs: EngineCosts, model: Model, gpu: Gpu, tensor: int, lora: LoraConfig, c: Constants
) -> EngineCosts:
    """Of an engine that adds an adapter's products to those of each layer, and pulls nothing else."""
    if lora.rank == 0:
        return costs
    pull = c.pull_overhead + _WIDTH * trained_part(model, lora).parameters / (gpu.pcie * tensor)
    longer = {name: (1.0 + c.decode_adapter_share) * getattr(costs, name) for name in _OF_LAYERS}
    return dataclasses.replace(costs, pull=pull, **longer)
