"""`laminar sim RUN_DIR --as verl,areal`: the same trajectories at the same measured costs under another
pipeline, on the run's own GPUs.

Lengths, the decode curve, each replica's speed, the trainer's seconds per token, publication and pulls are
those of the run; only who waits for whom is another's. What other systems pay beside that and the run did not
is left out: a global synchronisation, their handling of batches, the switch between training and generation.
So each is shown at its best.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace

from laminar_hpc.config.errors import LaminarError, did_you_mean
from laminar_hpc.machine.observability import console
from laminar_hpc.simulator.cost import faster
from laminar_hpc.simulator.finished.measured import Figures, Measured
from laminar_hpc.simulator.finished.prediction import figures_of, setup_of
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.setup import SimulationSetup


def _with_rules(name: str) -> Callable[[SimulationSetup], SimulationSetup]:
    """With weights on the run's own way."""
    rules = replace(PIPELINES[name], relays=True, isolated=True, overlapped=True)
    return lambda run: replace(run, rules=rules)


def _interrupted(run: SimulationSetup) -> SimulationSetup:
    """What an interrupt has prefilled again takes no longer than to decode it: what a local batch took beside
    its steps counts as prefill of its prompts elsewhere, and is not paid at an interrupt."""
    again = [min(kind.costs.prefill_token, kind.costs.request) for kind in run.engines]
    engines = tuple(
        replace(kind, costs=replace(kind.costs, prefill_token=token))
        for kind, token in zip(run.engines, again, strict=True)
    )
    return _with_rules("partial")(replace(run, engines=engines))


def _colocated(run: SimulationSetup) -> SimulationSetup:
    """All GPUs generate, then all train: as many more replicas as the trainer's GPUs hold, with the speeds of
    those that there were in turn, and as many times faster a trainer."""
    each = run.engines[0].gpus
    more = run.trainer_gpus // each
    engines = tuple(run.engines[i % len(run.engines)] for i in range(len(run.engines) + more))
    gpus = run.trainer_gpus + each * len(run.engines)
    token = faster(run.job, gpus / run.trainer_gpus).train_token
    job = replace(run.job, train_token=token, publish_stall=0.0)
    return replace(run, rules=PIPELINES["sync"], engines=engines, job=job, trainer_gpus=gpus)


# what `--as` names -> what it is, and the run as that pipeline
OTHERS: dict[str, tuple[str, Callable[[SimulationSetup], SimulationSetup]]] = {
    "verl": ("all GPUs generate a batch, then all train it", _colocated),
    "sync": ("one batch at a time, on the run's own split", _with_rules("sync_split")),
    "one_step": ("the next batch is generated during training", _with_rules("one_step")),
    "stream": ("the same, and mini-batches are trained as they end", _with_rules("stream")),
    "areal": ("new weights come into running trajectories, bound 4", _interrupted),
}


def names_of(given: str) -> list[str]:
    """The pipelines that `--as` names. Raises LaminarError."""
    names = list(dict.fromkeys(name for name in given.split(",") if name))
    for name in names or [given]:
        if name not in OTHERS:
            known = ", ".join(f"{key} ({about})" for key, (about, _) in OTHERS.items())
            raise LaminarError(f"--as={name}{did_you_mean(name, list(OTHERS))}: use some of {known}")
    return names


def run_as(measured: Measured, name: str) -> Figures:
    """Figures of the run under another pipeline."""
    _, change = OTHERS[name]
    return figures_of(simulate(change(setup_of(measured))))


def table(measured: Measured, own: Figures, others: dict[str, Figures]) -> list[str]:
    """What happened, the run as it is simulated, and as it would have been; `own over` is tokens/s of the
    simulated run over those of the other one."""
    rows = [("happened", measured.happened, ""), ("simulated", own, "")]
    for name, found in others.items():
        rows.append((f"as {name}", found, f"{own.tokens_per_second / found.tokens_per_second:.2f} x"))
    head = ("", "tokens/s", "own over", "s per step", "trainer waits", "rollouts idle", "staleness")
    lines = [head] + [
        (
            name,
            f"{f.tokens_per_second:,.0f}",
            over,
            f"{f.step_seconds:,.2f}",
            f"{f.trainer_wait_share:.1%}",
            f"{f.rollout_idle_share:.1%}",
            f"{f.staleness_mean:.2f}",
        )
        for name, f, over in rows
    ]
    told = [f"{'as ' + name:<12} {OTHERS[name][0]}" for name in others]
    return [*console.table(lines, left=(0,)), "", *told]


def as_dict(measured: Measured, own: Figures, others: dict[str, Figures]) -> dict[str, object]:
    found = {"happened": measured.happened, "simulated": own} | {f"as_{k}": v for k, v in others.items()}
    return {name: dataclasses.asdict(figures) for name, figures in found.items()}
