"""The three fitted constants of src/laminar_hpc/simulator/constants.py.

    python bench/simulator_fit.py     prints them beside the values that stand there

decode_layer_seconds   decode steps of 7B on one H100 (bench/simulator_checks.py), least squares of the ratios
eager_layer_seconds    the rollout of DORA's synchronous step at 64 GPUs: 65% of 22.91 min, an engine without
                       CUDA graphs
expert_launch_seconds  three publications of Megatron-core's layers with experts on H100, by all-to-all: two
                       training steps and a layer alone. The mean of the logs of what each would ask for
"""

import dataclasses
import math
import statistics

import numpy as np
from simulator_checks import H100_7B

from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.experts import expert_costs
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.sweep import point
from laminar_hpc.simulator.tables import GPUS, MODELS, Model, model_of
from laminar_hpc.simulator.trainer_cost import Layout, job_costs, updates_seconds

ROLLOUT_SECONDS = 0.65 * 22.91 * 60
SEEDS, ROUNDS, TAIL_STEPS = (
    (0, 1, 2),
    3,
    33_000,
)  # decode steps of a rollout: the longest response and its queue
CONTEXT = 200  # tokens of a request in the table


def decode_layer(c: Constants) -> float:
    """Seconds per layer with which the squares of the errors are least."""

    def squares(layer: float) -> float:
        costs = engine_costs(
            MODELS["7B"], GPUS["H100"], 1, dataclasses.replace(c, decode_layer_seconds=layer)
        )
        return sum((costs.step(n, CONTEXT * n) * rate / n - 1) ** 2 for n, rate in H100_7B)

    return min((step * 1e-6 for step in range(200)), key=squares)


def rollout(c: Constants) -> float:
    """Seconds in which DORA's synchronous run at 64 GPUs generates."""
    changes = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)}
    config = dataclasses.replace(load_simulation("dora", []), constants=changes)
    found = [
        point(dataclasses.replace(config, seed=seed), "sync", 64, 64, config.steps).figures for seed in SEEDS
    ]
    return statistics.fmean(f["trainer_wait_share"] * f["step_seconds"] for f in found)


def eager_layer(c: Constants) -> float:
    """Newton steps: each decode step of the tail takes as long as its launches."""
    layers = MODELS["32B"].layers
    for _ in range(ROUNDS):
        missing = ROLLOUT_SECONDS - rollout(c)
        c = dataclasses.replace(c, eager_layer_seconds=c.eager_layer_seconds + missing / TAIL_STEPS / layers)
    return c.eager_layer_seconds


MOONLIGHT = model_of(
    "moonshotai/Moonlight-16B-A3B",
    {
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 11264,
        "vocab_size": 163840,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
)
# Steps of sequences of 4,096 tokens of mock data without overlap or recomputation: model, GPUs, tensor and
# expert parallelism, sequences, seconds. NVIDIA-NeMo/Megatron-Bridge, docs/training/communication-overlap.md
# and skills/nemo-mbridge-perf-activation-recompute.
EXPERT_STEPS = [
    (MODELS["Qwen3-30B-A3B"], 16, 1, 16, 1024, 41.25),
    (MOONLIGHT, 8, 2, 8, 4, 0.45718),
]
# Forward and backward of a layer's experts and their exchanges alone, 4,096 tokens on each of eight GPUs,
# seconds (marin-community/marin, issue 3666)
EXPERT_LAYERS = {"Qwen3-30B-A3B": 34.95e-3, "Qwen3-235B-A22B": 25.62e-3}
SEQUENCE = 4096


def expert_step(model: Model, gpus: int, tensor: int, experts: int, sequences: int, c: Constants) -> float:
    """Seconds of one update."""
    layout = Layout(tensor, 1, gpus // tensor, SEQUENCE, 0.0, packed=True, experts=experts)
    job = job_costs(model, GPUS["H100"], gpus, layout, gpus, SEQUENCE, c)
    return updates_seconds([SEQUENCE] * sequences, 1, job, layout, np.random.default_rng(0)) + job.update


def expert_launch(c: Constants) -> float:
    """Seconds for each expert that a GPU holds, layer and pass that are missing without it."""
    c = dataclasses.replace(c, expert_launch_seconds=0.0, expert_load_spread=0.0)
    asked = []
    for model, gpus, tensor, experts, sequences, seconds in EXPERT_STEPS:
        missing = seconds - expert_step(model, gpus, tensor, experts, sequences, c)
        microbatches = sequences * tensor // gpus
        asked.append(missing / (2 * microbatches * model.expert_layers * model.experts / experts))
    alone = []
    for name, seconds in EXPERT_LAYERS.items():
        model = MODELS[name]
        costs = expert_costs(model, GPUS["H100"], 1, 8, c)
        products = 2.0 * model.expert_share * model.expert_parameters
        work = 3.0 * products / (c.train_kernel_efficiency * GPUS["H100"].flops) + 2.0 * costs.token
        alone.append((seconds - SEQUENCE * work / model.expert_layers) / (2 * model.experts / 8))
    return math.exp(statistics.fmean(map(math.log, [*asked, statistics.geometric_mean(alone)])))


if __name__ == "__main__":
    print(f"{'constant':24s}{'fitted':>12s}{'in constants':>16s}")
    for name, fitted in (
        ("decode_layer_seconds", decode_layer(DEFAULT)),
        ("expert_launch_seconds", expert_launch(DEFAULT)),
        ("eager_layer_seconds", eager_layer(DEFAULT)),
    ):
        print(f"{name:24s}{fitted:12.6g}{getattr(DEFAULT, name):16.6g}")
