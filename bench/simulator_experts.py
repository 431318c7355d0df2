"""Published times of Megatron-core's layers with experts on H100, exchanged by all-to-all, beside simulated
ones: what `expert_launch_seconds` is fitted to, for bench/simulator.py and bench/simulator_fit.py."""

import dataclasses
import math
import statistics

import numpy as np
from simulator_papers import row

from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.experts import expert_costs
from laminar_hpc.simulator.kernels import train_efficiency
from laminar_hpc.simulator.tables import GPUS, MODELS, Model
from laminar_hpc.simulator.trainer_cost import Layout, job_costs, updates_seconds

# Steps of sequences of 4,096 tokens of mock data without overlap or recomputation: model, GPUs, tensor and
# expert parallelism, sequences, seconds. NVIDIA-NeMo/Megatron-Bridge, docs/training/communication-overlap.md
# and skills/nemo-mbridge-perf-activation-recompute.
EXPERT_STEPS = [
    (MODELS["Qwen3-30B-A3B"], 16, 1, 16, 1024, 41.25),
    (MODELS["Moonlight-16B-A3B"], 8, 2, 8, 4, 0.45718),
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


def expert_layer(model: Model, c: Constants) -> float:
    """Seconds of one layer's experts, forward and backward, over eight GPUs."""
    costs = expert_costs(model, GPUS["H100"], 1, 8, c)
    products = 2.0 * model.expert_share * model.expert_parameters
    efficiency = train_efficiency(model, GPUS["H100"], c)
    work = 3.0 * products / (efficiency * GPUS["H100"].flops) + 2.0 * costs.token
    return (SEQUENCE * work + 2.0 * costs.microbatch) / model.expert_layers


def expert_launch(c: Constants) -> float:
    """Seconds for each expert that a GPU holds, layer and pass that are missing without it: the mean of the
    logs of what the three publications ask for."""
    c = dataclasses.replace(c, expert_launch_seconds=0.0, expert_load_spread=0.0)
    asked = []
    for model, gpus, tensor, experts, sequences, seconds in EXPERT_STEPS:
        missing = seconds - expert_step(model, gpus, tensor, experts, sequences, c)
        launches = 2 * sequences * tensor / gpus * model.expert_layers * model.experts / experts
        asked.append(missing / launches)
    alone = [
        (seconds - expert_layer(MODELS[name], c)) / (2 * MODELS[name].experts / 8)
        for name, seconds in EXPERT_LAYERS.items()
    ]
    return math.exp(statistics.fmean(map(math.log, [*asked, statistics.geometric_mean(alone)])))


def experts(rows: list[dict]) -> None:
    """What the fit leaves; loads are even, as they were."""
    c = dataclasses.replace(DEFAULT, expert_load_spread=0.0)
    for model, gpus, tensor, ranks, sequences, seconds in EXPERT_STEPS:
        found = expert_step(model, gpus, tensor, ranks, sequences, c)
        what = f"{model.name} on {gpus} H100, {sequences} x {SEQUENCE:,} tokens: s per update"
        rows.append(row("trainer", what, seconds, found, "fitted"))
    for name, seconds in EXPERT_LAYERS.items():
        what = f"{name}, a layer's experts alone on 8 H100: ms"
        rows.append(row("trainer", what, seconds * 1e3, expert_layer(MODELS[name], c) * 1e3, "fitted"))
