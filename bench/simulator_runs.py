"""Whole published runs whose inputs are known beside simulated ones, for bench/simulator.py. No constant was
chosen on them."""

import dataclasses

import numpy as np
from simulator_papers import row
from simulator_recipes import NEMO, RACKS, Recipe

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.rules import PIPELINES, Rules
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import Layout, batch_sample, logprob_seconds, updates_seconds

PROMPT_TOKENS = 150  # assumption
STEPS = 8 * 2048  # trajectories that are simulated: eight steps of most rows
_STEPS_MAX = 12


def rules_of(recipe: Recipe) -> Rules:
    """Asynchronous: weights change under requests, which keep their KV (in_flight_weight_updates)."""
    if recipe.mode == "sync":
        return PIPELINES["sync"]
    return dataclasses.replace(PIPELINES["partial_stale_kv"], max_staleness=recipe.staleness)


def in_flight(recipe: Recipe) -> int:
    """Prompts that a replica may have: of all, a batch for each step of staleness, at least one."""
    return -(-recipe.prompts * recipe.staleness // (recipe.generate // recipe.tensor))


def made(recipe: Recipe, drawn: dict[str, float] | None = None, steps: int = 0) -> SimulationSetup:
    """The recipe's run, with constants as `drawn`, for so many steps. Two log-prob passes, of the policy and
    of the reference model; spread of the lengths: Laminar's. vLLM, whose scheduler waits for each step; where
    it has its own GPUs, 0.8 of the memory and, as its asynchronous engine by default, 128 requests at a
    time."""
    tensor, stages, experts = recipe.layout
    layout = Layout(
        tensor,
        stages,
        recipe.train // (tensor * stages * recipe.context),
        recipe.longest,
        recipe.recompute,
        packed=True,
        logprob_tokens=recipe.logprobs * recipe.longest,
        experts=experts,
        even=recipe.even,
        context=recipe.context,
    )
    work = WorkloadConfig(
        prompts_per_step=recipe.prompts,
        samples_per_prompt=recipe.samples,
        updates_per_step=recipe.updates,
        prompt_tokens=PROMPT_TOKENS,
        mean_response_tokens=recipe.tokens - PROMPT_TOKENS,
        max_response_tokens=recipe.longest - PROMPT_TOKENS,
    )
    constants = dataclasses.replace(
        DEFAULT,
        **(drawn or {})
        | {
            "logprob_passes": 2.0,
            "kv_memory_share": 0.8,
            "kv_memory_share_colocated": recipe.memory,
        },
    )
    return setup(
        rules_of(recipe),
        MODELS[recipe.model],
        GPUS[recipe.gpu],
        recipe.train,
        [(GPUS[recipe.gpu], recipe.generate, recipe.tensor, None)],
        work,
        constants,
        engine="vllm",
        layout=layout,
        steps=steps or min(_STEPS_MAX, STEPS // (recipe.prompts * recipe.samples)),
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
    errors: dict[str, list[float]] = {"dense": [], "experts": [], "racks": []}
    for recipe in (*NEMO, *RACKS):
        figures = simulated(recipe)
        gpus = recipe.train if recipe.mode == "sync" else recipe.train + recipe.generate
        what = f"NeMo RL {recipe.version}, {recipe.model}, {recipe.mode} on {gpus} {recipe.gpu}: s per step"
        note = f"trainer waits {figures['trainer_wait_share']:.0%}"
        rows.append(row("runs", what, recipe.seconds, figures["step_seconds"], note))
        kind = "racks" if recipe.gpu != "H100" else "experts" if MODELS[recipe.model].experts else "dense"
        errors[kind].append(abs(rows[-1]["error"]))
        if recipe.phases:
            parts = zip(
                ("generation", "updates", "log-probs"), recipe.phases, phases(recipe, figures), strict=True
            )
            for name, published, found in parts:
                what = f"NeMo RL {recipe.version}, {recipe.model} on {gpus}, {name}: s"
                rows.append(row("runs", what, published, found))
    every = errors["dense"] + errors["experts"]
    return {
        "runs_mean_error": sum(every) / len(every),
        "runs_worst_error": max(every),
        "runs_worst_dense_error": max(errors["dense"]),
        "runs_mean_rack_error": sum(errors["racks"]) / len(errors["racks"]),
    }
