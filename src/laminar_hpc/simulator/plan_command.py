"""`laminar plan QUESTION [key=value ...] [--json]`: the plan, what it expects, the runner-up, the files of
the run and how to start it. `laminar plan RUN_DIR`: finished/."""

import dataclasses
import json
import math
import shlex
from argparse import Namespace
from pathlib import Path

from laminar_hpc.config.check import check
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.divisions import (
    RECOMPUTED,
    away,
    describe,
    kv_cache_tokens,
    repack_of,
    trainer_settings,
)
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.plan import Plan, RatedCandidate, search
from laminar_hpc.simulator.plan_files import (
    beside_trainers,
    experiment,
    launch_script,
    numbers,
    on_one_machine,
    rollout_machines,
    sbatch,
    trainer_machines,
)
from laminar_hpc.simulator.plan_memory import lanes
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.settings import load_plan, output_folder, questions, say


def expectations(config: PlanConfig, plan: Plan) -> list[str]:
    """The lines that tell the user what the best placement is and what it should reach."""
    f = plan.best.figures
    assert f is not None
    best = plan.best.candidate
    t, machines = trainer_settings(config, best), sum(part.count for part in rollout_machines(config, best))
    recompute = RECOMPUTED.get(t.recompute_activations, "")
    lines = [
        f"plan         {describe(config, plan.best.candidate)}",
        f"trainer      {layout_text(t)}, micro-batches of {t.pack_tokens:,} tokens"
        f"{', ' * bool(recompute)}{recompute}",
        f"rollouts     {kv_cache_tokens(config, best):,} KV tokens each, repack {repack_of(config, best)};  "
        f"relays {machines * lanes(config)} on {machines} rollout machine{'s' if machines > 1 else ''}",
        f"expected     {f['tokens_per_second']:,.0f} tokens/s, a step in {f['step_seconds']:,.0f} s, "
        f"trainer waits {f['trainer_wait_share']:.0%}, rollouts idle {f['rollout_idle_share']:.0%}, "
        f"staleness {f['staleness_training_mean']:.1f} (max {f['staleness_training_max']})",
        f"price        ${plan.best.price:,.{0 if plan.best.price >= 10 else 2}f} per hour, "
        f"{f['tokens_per_second'] * 3.6e-3 / plan.best.price:,.2f} M tokens per $",
    ]
    if plan.runner_up is not None:
        lines += [
            f"runner-up    {describe(config, plan.runner_up.candidate)}",
            f"             {explain(plan)}",
        ]
    return [*lines, f"search       {plan.rest}"]


def layout_text(t: TrainerConfig) -> str:
    context = f"CP {t.context_parallel} x " if t.context_parallel > 1 else ""
    chunks = f" of {t.virtual_stages} chunks" if t.virtual_stages > 1 else ""
    experts = f", EP {t.expert_parallel}" if t.expert_parallel > 1 else ""
    return (
        f"TP {t.tensor_parallel} x {context}PP {t.pipeline_parallel}{chunks} x DP {t.data_parallel}{experts}"
    )


def explain(plan: Plan) -> str:
    """Why the runner-up is second."""
    best, second = plan.best, plan.runner_up
    if second is None or best.figures is None or second.figures is None:
        return "no other was simulated"
    if second.why_not:
        return second.why_not
    a, b = best.figures, second.figures
    if b["trainer_wait_share"] > a["trainer_wait_share"] + 0.01:
        side = "its trainer waits"
    elif b["trainer_wait_share"] < 0.05:
        side = "its trainer is the narrower side"
    else:
        side = "its rollouts fill less of their KV"
    waits = f"trainer waits {b['trainer_wait_share']:.0%} against {a['trainer_wait_share']:.0%}"
    idle = f"rollouts idle {b['rollout_idle_share']:.0%} against {a['rollout_idle_share']:.0%}"
    return f"{1 - second.score / best.score:.1%} worse: {side} ({waits}, {idle})"


def write(config: PlanConfig, plan: Plan, folder: Path) -> list[str]:
    """Writes the plan's files into `folder` and tries the experiment as `laminar train ... dry_run=true`
    does. Gives the lines that say how to run it. Raises LaminarError, and leaves no file, when the experiment
    would be refused."""
    candidate, name = plan.best.candidate, config.name
    assert plan.best.figures is not None
    file = folder / "experiment" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(experiment(config, candidate, plan.best.figures))
    words = ["--config-dir", str(folder), f"experiment={name}"]
    try:
        check(load_config([*words, "dry_run=true"]))
    except LaminarError as error:
        file.unlink()
        raise LaminarError(
            f"plan: {describe(config, candidate)}: its experiment is refused: {error}"
        ) from None
    yours = "data.train=FILE reward.function=NAME"
    lines = [f"file         {file}", f"try          laminar train {shlex.join(words)} dry_run=true"]
    if on_one_machine(config):
        return [*lines, f"run          laminar train {shlex.join(words)} {yours}"]
    script = folder / f"{name}.sh"
    script.write_text(launch_script(config, candidate))
    script.chmod(0o755)
    rollouts = rollout_machines(config, candidate)
    counts = {
        "trainer": trainer_machines(config, candidate).count,
        "rollout": sum(part.count for part in rollouts),
    }
    shown = shlex.quote(str(script))
    lines += [
        f"run          {shown} controller 0 {yours}   on the first trainer machine",
        *(
            f"             {shown} {role} N {yours}   on {role} machine N = {numbers(range(count))}"
            for role, count in counts.items()
        ),
    ]
    if both := beside_trainers(rollouts):
        trainers = numbers(range(len(both)))
        lines.append(
            f"             rollout machine {numbers(both)} is trainer machine {trainers}, on its other GPUs"
        )
    if away(config, candidate):
        lines += [
            "needs        RUN_DIR on one file system that the machines of all places mount; without one,",
            "             cluster.storage=stream, and elsewhere `laminar join` in place of the script",
        ]
    else:  # one Slurm job reaches all machines
        job = folder / f"{name}.sbatch"
        job.write_text(sbatch(config, candidate))
        lines.append(f"or           cd {shlex.quote(str(folder))} && sbatch {job.name} {yours}")
    return lines


def _as_dict(planned: RatedCandidate) -> dict[str, object]:
    """Without a score that no number is: that of one that keeps the trainer too idle or is too slow."""
    score = planned.score if math.isfinite(planned.score) else None
    return dataclasses.asdict(planned) | {"score": score}


def main(options: Namespace) -> int:
    """`laminar plan QUESTION`: searches, writes the files of the best placement, prints it. Returns 0."""
    name, *overrides = options.words
    if finished.is_run(name, questions()):
        return finished.plan(name, overrides, options.json)
    config = load_plan(name, overrides)
    folder = output_folder(config, f"runs/plan-{config.name}")
    plan = search(config, say)
    lines = write(config, plan, folder)
    if options.json:
        second = plan.runner_up and _as_dict(plan.runner_up)
        answer: dict[str, object] = {
            "best": _as_dict(plan.best),
            "runner_up": second,
            "simulated": plan.simulated,
        }
        answer |= {"divisions": plan.candidates, "excluded": plan.excluded, "cut_off": plan.cut_off}
        print(json.dumps(answer, indent=1))
    else:
        print("\n".join([*expectations(config, plan), *lines]))
    return 0
