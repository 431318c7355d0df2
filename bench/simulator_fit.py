"""The three fitted constants, on DORA's synchronous row at 64 GPUs (22.91 min per step, 14,143 tokens/s, 65%
rollout only).

    python bench/simulator_fit.py [ENGINE]     prints them

They stand in src/laminar_hpc/simulator/constants.py and were fitted with SGLang's admission, the default;
with that of the row's own engine, vllm, the first is 0.7% lower and the others are equal.
"""

import dataclasses
import sys

from laminar_hpc.simulator import constants
from laminar_hpc.simulator.constants import (
    DEFAULT,
    GPUS,
    GPUS_PER_MACHINE,
    MODELS,
    PROMPT_TOKENS,
    SIGMA_DORA,
    Constants,
)
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import setup

STEP_SECONDS, TOKENS_PER_SECOND, ROLLOUT_SHARE, TRAJECTORIES, CAP = 22.91 * 60, 14_143, 0.65, 8192, 30_720
SEEDS, STEPS, ROUNDS, TAIL_STEPS = (
    (0, 1, 2),
    12,
    4,
    33_000,
)  # decode steps of a rollout: the longest response and what queues before it


def synchronous(c: Constants, engine: str) -> tuple[float, float, float]:
    """Seconds of rollout, seconds of the rest, and tokens of a step."""
    rows = []
    model, gpu = MODELS["32B"], GPUS["H800"]
    work = WorkloadConfig(
        mean_response_tokens=c.mean_response_tokens_dora, max_response_tokens=CAP, sigma=SIGMA_DORA
    )
    for seed in SEEDS:
        run = setup(
            PIPELINES["sync"],
            model,
            gpu,
            64,
            [(gpu, 64, model.tensor_parallel, None)],
            work,
            c,
            engine=engine,
            steps=STEPS,
            warmup_steps=1,
            seed=seed,
        )
        f = simulate(run).figures
        rows.append(
            (
                f["trainer_wait_share"] * f["step_seconds"],
                (1 - f["trainer_wait_share"]) * f["step_seconds"],
                f["tokens_per_step"],
            )
        )
    rollout, rest, tokens = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return rollout, rest, tokens


def fit(engine: str) -> Constants:
    """Newton steps, each constant on the observation that it moves."""
    target = TOKENS_PER_SECOND * STEP_SECONDS
    layers, prompts = MODELS["32B"].layers, TRAJECTORIES * PROMPT_TOKENS
    c = DEFAULT
    for _ in range(ROUNDS):
        rollout, rest, tokens = synchronous(c, engine)
        exchange = (
            16
            * c.gradient_bytes_per_parameter
            * MODELS["32B"].parameters
            / (GPUS_PER_MACHINE * GPUS["H800"].nic)
        )
        handling = TRAJECTORIES * (1 + c.logprob_passes) * c.batch_handling * CAP
        fixed = c.colocated_switch + exchange + handling
        c = dataclasses.replace(
            c,
            decode_overhead_per_layer=c.decode_overhead_per_layer
            + (ROLLOUT_SHARE * STEP_SECONDS - rollout) / TAIL_STEPS / layers,
            train_mfu=c.train_mfu * (rest - fixed) / ((1 - ROLLOUT_SHARE) * STEP_SECONDS - fixed),
            mean_response_tokens_dora=c.mean_response_tokens_dora * (target - prompts) / (tokens - prompts),
        )
    return c


if __name__ == "__main__":
    found = fit(sys.argv[1] if len(sys.argv) > 1 else "sglang")
    print(f"{'constant':28s}{'fitted':>12s}{'in ' + constants.__name__.rpartition('.')[2]:>16s}")
    for name in ("decode_overhead_per_layer", "train_mfu", "mean_response_tokens_dora"):
        print(f"{name:28s}{getattr(found, name):12.6g}{getattr(DEFAULT, name):16.6g}")
