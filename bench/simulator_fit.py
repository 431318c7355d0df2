"""The three fitted constants of src/laminar_hpc/simulator/constants.py.

    python bench/simulator_fit.py     prints them beside the values that stand there

decode_layer_seconds   decode steps of 7B on one H100 (bench/simulator_checks.py), least squares of the ratios
eager_layer_seconds    the rollout of DORA's synchronous step at 64 GPUs: 65% of 22.91 min, an engine without
                       CUDA graphs
expert_launch_seconds  three publications of layers with experts (bench/simulator_experts.py)
"""

import dataclasses
import statistics

from simulator_checks import H100_7B
from simulator_experts import expert_launch

from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.sweep import point
from laminar_hpc.simulator.tables import GPUS, MODELS

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
    config = load_simulation("dora", [])
    config = dataclasses.replace(config, constants=changes | config.constants)
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


if __name__ == "__main__":
    print(f"{'constant':24s}{'fitted':>12s}{'in constants':>16s}")
    for name, fitted in (
        ("decode_layer_seconds", decode_layer(DEFAULT)),
        ("expert_launch_seconds", expert_launch(DEFAULT)),
        ("eager_layer_seconds", eager_layer(DEFAULT)),
    ):
        print(f"{name:24s}{fitted:12.6g}{getattr(DEFAULT, name):16.6g}")
