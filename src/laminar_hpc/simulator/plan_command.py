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
    Candidate,
    away,
    describe,
    kv_cache_tokens,
    machine_size,
    repack_of,
    trainer_settings,
)
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.plan import Plan, RatedCandidate, search
from laminar_hpc.simulator.plan_files import (
    experiment,
    on_one_machine,
    rollout_machines,
    trainer_machines,
)
from laminar_hpc.simulator.plan_memory import lanes
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.settings import load_plan, output_folder, questions, say
from laminar_hpc.simulator.tables import GPUS


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
    """Writes the plan's file into `folder` and tries it as `laminar train ... dry_run=true` does. Gives the
    lines that say how to run it. Raises LaminarError, and leaves no file, when the experiment would be
    refused."""
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
    option = f"--plan={shlex.quote(str(file))}"
    lines += [
        f"run          laminar launch --hosts FILE {option} {yours}",
        f"             FILE lists {host_lines(config, candidate)}",
    ]
    if away(config, candidate):
        return [
            *lines,
            "needs        run_dir on one file system that the machines of all places mount, or",
            "             cluster.storage=stream",
        ]
    if options := submitted(config, candidate):
        lines.append(f"or           laminar submit {option} {yours} {options}")
    return lines


def host_lines(config: PlanConfig, candidate: Candidate) -> str:
    """The machines in the order in which `laminar launch` takes them: the trainer's first."""
    parts = [part for part in rollout_machines(config, candidate) if not part.beside]
    counts = dict[int, int]()
    for part in (trainer_machines(config, candidate), *parts):
        counts[part.pool] = counts.get(part.pool, 0) + part.count
    of_pools = ((count, config.pools[number]) for number, count in counts.items())
    return ", then ".join(
        f"{count} machine{'s' * (count > 1)} of {pool.gpu} with gpus={machine_size(pool)}"
        for count, pool in of_pools
    )


def submitted(config: PlanConfig, candidate: Candidate) -> str:
    """The options of `laminar submit`: the GPUs of a node, and of several kinds the names. Empty where the
    nodes differ in size."""
    used = [config.pools[number] for number in (candidate.trainer_pool, *(r[0] for r in candidate.rollouts))]
    kinds = list(dict.fromkeys(pool.gpu for pool in used[1:]))
    sizes = {GPUS[pool.gpu].machine for pool in used}
    if len(sizes) > 1:
        return ""
    options = f"--apart --gpus-per-node={sizes.pop()}"
    if kinds != [used[0].gpu]:
        options += f" --trainer='--constraint={used[0].gpu}' --rollouts='--constraint={'|'.join(kinds)}'"
    return options


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
