"""`laminar plan QUESTION [key=value ...] [--json]`: the plan, what it expects, the runner-up; a run's experiment file and sbatch header."""

import dataclasses
import json
import math
import sys
from pathlib import Path

from laminar_hpc.simulator.constants import GPUS_PER_MACHINE
from laminar_hpc.simulator.load import load_plan, questions, take_apart
from laminar_hpc.simulator.plan import Candidate, Plan, describe, explain, layout_of, search
from laminar_hpc.simulator.schema import PlanConfig


def experiment(config: PlanConfig, candidate: Candidate) -> str:
    """A file for conf/experiment. One run has one kind of replica: of several kinds the first is in the keys, the others in the comment."""
    layout = layout_of(config, candidate)
    w = config.workload
    _, gpus, replica_tp = candidate.rollouts[0]
    lines = [
        "# @package _global_",
        f"# laminar plan {config.name}: {describe(config, candidate)}; one relay per rollout machine.",
        f"# Give model.path (Qwen2.5-{config.model}), data.train and reward.function; dry_run=true says what would start.",
        f"run_dir: runs/{config.name}",
        "model: {dtype: bfloat16}",
        f"trainer: {{tensor_parallel: {layout.tensor}, pipeline_parallel: {layout.stages}, data_parallel: {layout.ranks}, "
        "distributed_optimizer: true, "
        f"tokens_per_microbatch: {max(4096, 2 * (w.max_response_tokens + w.prompt_tokens))}}}",
        f"rollout: {{replicas: {gpus // replica_tp}, tensor_parallel: {replica_tp}, max_concurrent: {config.max_concurrent}}}",
        f"algorithm: {{prompts_per_step: {w.prompts_per_step}, samples_per_prompt: {w.samples_per_prompt}, "
        f"minibatches_per_step: {w.updates_per_step}}}",
        f"sampling: {{max_response_tokens: {w.max_response_tokens}}}",
        f"pipeline: {{name: laminar, refresh: drained, max_staleness: {config.max_staleness}}}",
    ]
    return "\n".join(lines) + "\n"


def sbatch_header(config: PlanConfig, candidate: Candidate) -> str:
    """One component of a heterogeneous job per pool and role; the first one also holds the controller."""
    parts = [("trainer", candidate.trainer_pool, candidate.trainer_gpus)]
    parts += [("rollouts and relays", pool, gpus) for pool, gpus, _ in candidate.rollouts]
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={config.name}", "#SBATCH --requeue", "#SBATCH --signal=B:USR1@120"]
    for index, (role, pool, gpus) in enumerate(parts):
        lines += ["#SBATCH hetjob"] if index else []
        each = min(GPUS_PER_MACHINE, gpus)
        lines.append(
            f"#SBATCH --nodes={math.ceil(gpus / each)} --gpus-per-node={config.pools[pool].gpu.lower()}:{each} --ntasks-per-node=1"
        )
        lines.append(f"# ^ {role}" + (", preemptible" if config.pools[pool].preemptible else ""))
    return "\n".join(lines) + "\n"


def expectations(config: PlanConfig, plan: Plan) -> list[str]:
    f = plan.best.figures
    assert f is not None
    layout = layout_of(config, plan.best.candidate)
    relays = sum(math.ceil(gpus / GPUS_PER_MACHINE) for _, gpus, _ in plan.best.candidate.rollouts)
    lines = [
        f"plan         {describe(config, plan.best.candidate)}",
        f"trainer      TP {layout.tensor} x PP {layout.stages} x DP {layout.ranks};  relays {relays}, one per rollout machine",
        f"expected     {f['tokens_per_second']:,.0f} tokens/s, a step in {f['step_seconds']:,.0f} s, "
        f"trainer waits {f['trainer_wait_share']:.0%}, rollouts idle {f['rollout_idle_share']:.0%}, "
        f"staleness {f['staleness_training_mean']:.1f} (max {f['staleness_training_max']})",
        f"price        ${plan.best.price:,.0f} per hour, {f['tokens_per_second'] * 3.6e-3 / plan.best.price:,.2f} M tokens per $",
    ]
    if plan.runner_up is not None:
        lines += [f"runner-up    {describe(config, plan.runner_up.candidate)}", f"             {explain(plan)}"]
    return [*lines, f"search       {plan.simulated} of {plan.candidates} candidates simulated; no other can be better"]


def main(arguments: list[str]) -> int:
    name, overrides, as_json = take_apart(arguments, "plan", "question", questions())
    config = load_plan(name, overrides)
    plan = search(config, lambda line: print(line, file=sys.stderr, flush=True))
    folder = Path(config.out_dir or f"runs/plan-{config.name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{config.name}.yaml").write_text(experiment(config, plan.best.candidate))
    (folder / f"{config.name}.sbatch").write_text(sbatch_header(config, plan.best.candidate))
    if as_json:
        second = plan.runner_up and dataclasses.asdict(plan.runner_up)
        print(json.dumps({"best": dataclasses.asdict(plan.best), "runner_up": second, "simulated": plan.simulated}, indent=1))
    else:
        print("\n".join([*expectations(config, plan), f"files        {folder}/{config.name}.yaml  {folder}/{config.name}.sbatch"]))
    return 0
