"""What `laminar sim EXPERIMENT --without NAME` leaves out of a simulated run: one line for each mechanism."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from laminar_hpc.simulator.schema import SimulationConfig
from laminar_hpc.simulator.setup import SimulationSetup


@dataclass(frozen=True)
class Mechanism:
    """`setup`, `config`: give the same run without it; a run that neither changes has no such mechanism."""

    about: str
    setup: Callable[[SimulationSetup], SimulationSetup] = lambda run: run
    config: Callable[[SimulationConfig], SimulationConfig] = lambda config: config


def _no_repack(run: SimulationSetup) -> SimulationSetup:
    return replace(run, rules=replace(run.rules, repack="off"))


def _in_order(run: SimulationSetup) -> SimulationSetup:
    """Lengths are known of prompts that come again alone."""
    return replace(run, rules=replace(run.rules, dispatch="in_order")) if run.workload.prompts else run


def _no_relays(run: SimulationSetup) -> SimulationSetup:
    """The trainer stands still while it hands its weights to all rollouts, each of which takes as long."""
    engines = tuple(
        replace(kind, costs=replace(kind.costs, pull=kind.costs.global_sync)) for kind in run.engines
    )
    return replace(run, rules=replace(run.rules, relays=False), engines=engines) if run.rules.relays else run


def _all_wait(run: SimulationSetup) -> SimulationSetup:
    """All replicas generate one batch together, and take the newest weights together."""
    drained = run.rules.refresh == "drained"
    return replace(run, rules=replace(run.rules, refresh="barrier", repack="off")) if drained else run


def _full_copies(config: SimulationConfig) -> SimulationConfig:
    far = any(site.wan_gbps is not None for site in config.sites)
    return replace(config, constants={**config.constants, "changed_bytes_share": 1.0}) if far else config


def _jobs_restart(run: SimulationSetup) -> SimulationSetup:
    fails = run.trainer_mtbf or any(kind.mtbf for kind in run.engines)
    return replace(run, rules=replace(run.rules, isolated=False)) if fails else run


def _handled_first(run: SimulationSetup) -> SimulationSetup:
    return replace(run, rules=replace(run.rules, overlapped=False))


MECHANISMS: dict[str, Mechanism] = {
    "repack": Mechanism("long responses are moved together", _no_repack),
    "dispatch": Mechanism("local batches share the prompts whose responses were long", _in_order),
    "speculation": Mechanism("engines verify guesses", config=lambda c: replace(c, speculation=False)),
    "relays": Mechanism("weights go through the relays", _no_relays),
    "own_pace": Mechanism("each replica takes new weights when it has drained", _all_wait),
    "overlap": Mechanism("the next batch is handled during training", _handled_first),
    "isolation": Mechanism("a failure stops one role, not the job", _jobs_restart),
    "deltas": Mechanism("only what has changed goes to other places", config=_full_copies),
    "cuda_graphs": Mechanism("engines launch CUDA graphs", config=lambda c: replace(c, cuda_graphs=False)),
}
