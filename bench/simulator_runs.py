"""Whole published runs whose inputs are known beside simulated ones, for bench/simulator.py. No constant was
chosen on them."""

import dataclasses
from typing import NamedTuple

import numpy as np
from simulator_papers import row

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.rules import PIPELINES, Rules
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import Layout, batch_sample, logprob_seconds, updates_seconds

PROMPT_TOKENS = 150  # assumption
HOST_SECONDS = 29e-6  # constants.py, decode_request_seconds
STEPS = 8 * 2048  # trajectories that are simulated: eight steps of most rows


class Recipe(NamedTuple):
    """NeMo RL: its blog post of 0.3, docs/about/performance-summary.md of 0.4 to 0.6 (GRPO on H100), and the
    recipes of the same version. `tokens`: mean of a trajectory. `train`, `generate`: GPUs. `tensor`:
    parallelism of the engines. `layout`: tensor, pipeline and expert parallelism of the trainer. `seconds`:
    of a step. `recompute`: activation checkpointing. `logprobs`: sequences of the longest length in a
    micro-batch of log-probs. `phases`: seconds of generation, updates and log-probs, where they are
    published. `staleness`: in steps, where it is asynchronous."""

    version: str
    model: str
    mode: str
    tokens: int
    train: int
    generate: int
    tensor: int
    layout: tuple[int, int, int]
    seconds: float
    recompute: float = 0.0
    logprobs: int = 4
    prompts: int = 64
    updates: int = 4
    longest: int = 4096
    even: bool = False
    memory: float = 0.6  # of the engines, where they share the trainer's GPUs
    phases: tuple[float, ...] = ()
    staleness: int = 1


# Generated tokens are published for 0.3, without the prompt.
NEMO = [
    Recipe("0.3", "Llama-3.1-8B", "sync", 945, 8, 8, 1, (1, 1, 1), 112.0, phases=(58, 28, 18)),
    Recipe("0.3", "Llama-3.1-70B", "sync", 548, 64, 64, 4, (4, 4, 1), 147.0, phases=(84, 28, 18)),
    Recipe("0.3", "Qwen3-32B", "sync", 3433, 64, 64, 4, (4, 2, 1), 213.0, phases=(96, 68, 40)),
    Recipe(
        "0.3", "Qwen3-30B-A3B", "sync", 3401, 64, 64, 4, (2, 1, 8), 167.0, memory=0.7, phases=(78, 50, 23)
    ),
    Recipe("0.4", "Llama-3.1-8B", "sync", 1060, 16, 16, 1, (1, 2, 1), 97.7, 1.0, 2),
    Recipe("0.4", "Llama-3.1-8B", "async", 1129, 8, 8, 1, (1, 2, 1), 74.6, 1.0, 2),
    Recipe("0.4", "Qwen3-32B", "sync", 3206, 32, 32, 4, (4, 4, 1), 393.0),
    Recipe("0.4", "Qwen3-32B", "async", 3207, 32, 32, 4, (4, 4, 1), 215.0),
    Recipe("0.4", "Qwen3-30B-A3B", "sync", 3154, 32, 32, 4, (2, 1, 8), 225.0),
    Recipe("0.4", "Qwen3-30B-A3B", "async", 3158, 16, 16, 4, (2, 1, 8), 244.0),
    Recipe(
        "0.4", "Qwen3-235B-A22B", "async", 5691, 128, 128, 8, (4, 8, 16), 241.0, 1.0, 1, 16, 1, 8192, True
    ),
    Recipe("0.5", "Llama-3.1-8B", "sync", 1019, 16, 16, 1, (1, 2, 1), 92.8, 1.0, 2),
    Recipe("0.5", "Llama-3.1-8B", "async", 1123, 8, 8, 1, (1, 1, 1), 64.8, 1.0, 2),
    Recipe("0.5", "Qwen3-32B", "sync", 3251, 32, 32, 4, (4, 4, 1), 376.0),
    Recipe("0.5", "Qwen3-32B", "async", 3252, 32, 32, 4, (4, 4, 1), 200.0),
    Recipe("0.5", "Qwen3-30B-A3B", "sync", 3196, 32, 32, 2, (1, 1, 8), 198.0),
    Recipe("0.5", "Qwen3-30B-A3B", "async", 3201, 16, 16, 2, (1, 2, 8), 154.0),
    Recipe(
        "0.5", "Qwen3-235B-A22B", "async", 5707, 128, 128, 8, (4, 8, 16), 203.0, 1.0, 1, 16, 1, 8192, True
    ),
    Recipe("0.6", "Qwen3-30B-A3B", "async", 3206, 128, 64, 2, (1, 1, 8), 34.5, staleness=8),
]


def rules_of(recipe: Recipe) -> Rules:
    """Asynchronous: weights change under requests, which keep their KV (in_flight_weight_updates)."""
    if recipe.mode == "sync":
        return PIPELINES["sync"]
    return dataclasses.replace(PIPELINES["partial_stale_kv"], max_staleness=recipe.staleness)


def in_flight(recipe: Recipe) -> int:
    """Prompts that a replica may have: of all, a batch for each step of staleness, at least one."""
    return -(-recipe.prompts * recipe.staleness // (recipe.generate // recipe.tensor))


def made(recipe: Recipe) -> SimulationSetup:
    """The recipe's run. Two log-prob passes, of the policy and of the reference model; spread of the lengths:
    Laminar's. vLLM, whose scheduler waits for each step; where it has its own GPUs, 0.8 of the memory and, as
    its asynchronous engine by default, 128 requests at a time."""
    tensor, stages, experts = recipe.layout
    layout = Layout(
        tensor,
        stages,
        recipe.train // (tensor * stages),
        recipe.longest,
        recipe.recompute,
        packed=True,
        logprob_tokens=recipe.logprobs * recipe.longest,
        experts=experts,
        even=recipe.even,
    )
    work = WorkloadConfig(
        prompts_per_step=recipe.prompts,
        samples_per_prompt=32,
        updates_per_step=recipe.updates,
        prompt_tokens=PROMPT_TOKENS,
        mean_response_tokens=recipe.tokens - PROMPT_TOKENS,
        max_response_tokens=recipe.longest - PROMPT_TOKENS,
    )
    constants = dataclasses.replace(
        DEFAULT,
        logprob_passes=2.0,
        decode_request_seconds=HOST_SECONDS,
        kv_memory_share=0.8,
        kv_memory_share_colocated=recipe.memory,
    )
    return setup(
        rules_of(recipe),
        MODELS[recipe.model],
        GPUS["H100"],
        recipe.train,
        [(GPUS["H100"], recipe.generate, recipe.tensor, None)],
        work,
        constants,
        engine="vllm",
        layout=layout,
        steps=STEPS // (recipe.prompts * 32),
        warmup_steps=2,
        max_concurrent=1024 if recipe.mode == "sync" else 128,
        local_batch_groups=in_flight(recipe),
    )


def simulated(recipe: Recipe) -> dict[str, float]:
    """Figures of the recipe's run."""
    return simulate(made(recipe)).figures


def phases(recipe: Recipe, figures: dict[str, float]) -> tuple[float, float, float]:
    """Seconds of generation, updates and log-probs in a step of a synchronous run."""
    run = made(recipe)
    tokens, updates = batch_sample(run.workload), recipe.updates
    seconds = updates_seconds(tokens, updates, run.job, run.layout, np.random.default_rng(0))
    generation = figures["trainer_wait_share"] * figures["step_seconds"]
    return generation, seconds + updates * run.job.update, logprob_seconds(tokens, run.job, run.layout)


def runs(rows: list[dict]) -> dict[str, float]:
    """Seconds of a step, kept apart from all fits, and of its phases."""
    errors: dict[bool, list[float]] = {False: [], True: []}
    for recipe in NEMO:
        figures = simulated(recipe)
        gpus = recipe.train if recipe.mode == "sync" else recipe.train + recipe.generate
        what = f"NeMo RL {recipe.version}, {recipe.model}, {recipe.mode} on {gpus}: s per step"
        note = f"trainer waits {figures['trainer_wait_share']:.0%}"
        rows.append(row("runs", what, recipe.seconds, figures["step_seconds"], note))
        errors[MODELS[recipe.model].experts > 0].append(abs(rows[-1]["error"]))
        if recipe.phases:
            parts = zip(
                ("generation", "updates", "log-probs"), recipe.phases, phases(recipe, figures), strict=True
            )
            for name, published, found in parts:
                what = f"NeMo RL {recipe.version}, {recipe.model} on {gpus}, {name}: s"
                rows.append(row("runs", what, published, found))
    every = errors[False] + errors[True]
    return {
        "runs_mean_error": sum(every) / len(every),
        "runs_worst_error": max(every),
        "runs_worst_dense_error": max(errors[False]),
    }
