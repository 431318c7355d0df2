"""Several trainer groups: each with a trainer, rollouts and batches of its own, all of one policy. At the end
of a step they average their weights, so that each waits for the slowest.

Between two exchanges the groups know nothing of each other, so each has a clock of its own, which stands
while its trainer waits for the others. The cost is that of the groups one by one.
"""

import dataclasses
from collections import Counter
from functools import partial

from laminar_hpc.machine.collector import without_collector
from laminar_hpc.simulator.constants import Constants
from laminar_hpc.simulator.run import Simulation, SimulationOutcome
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.tables import Model

_MASTER_BYTES = 4  # of a parameter, in the precision in which it is averaged
_SEEDS = 1_000_003  # between those of two groups: each has prompts of its own
_MEANS = ("_share", "_mean", "_seconds", "_use", "_low", "_high")  # endings of figures that groups share


def exchange_seconds(model: Model, groups: int, c: Constants) -> float:
    """A reduce-scatter and an all-gather of the weights over the groups."""
    size = _MASTER_BYTES * model.parameters
    return 2.0 * (groups - 1) / groups * size / c.group_exchange_bytes_per_second


def simulate_groups(setup: SimulationSetup, groups: int, exchange: float) -> SimulationOutcome:
    """`setup`: of one group; `exchange`: seconds. Rates and counts are sums over all."""
    with without_collector():
        seeds = (setup.seed + _SEEDS * number for number in range(groups))
        parts = [
            Simulation(dataclasses.replace(setup, seed=seed, watch=setup.watch and seed == setup.seed))
            for seed in seeds
        ]
        stands: list[Simulation] = []
        for part in parts:
            part.trainer.finish_step = partial(_stand, part, stands)
        while True:
            for part in parts:
                part.clock.running = True
                part.clock.run()
            if not stands:
                break
            end = max(part.clock.now for part in stands) + exchange
            for part in stands:
                part.trainer.book("exchange", part.clock.now, end)
                part.trainer.ends_at = end
                part.clock.at(end, part.trainer.end_step)
            stands.clear()
        return merged([part.outcome() for part in parts])


def _stand(part: Simulation, stands: list[Simulation]) -> None:
    """Stops a group's clock: its trainer waits for the other groups."""
    part.clock.running = False
    stands.append(part)


def merged(outcomes: list[SimulationOutcome]) -> SimulationOutcome:
    """One outcome of all; time lines and samples are those of the first."""
    figures: dict[str, float] = {}
    for key in outcomes[0].figures:
        values = [outcome.figures[key] for outcome in outcomes]
        if key.endswith("_max") or key == "seconds":
            figures[key] = max(values)
        else:
            figures[key] = sum(values) / len(values) if key.endswith(_MEANS) else sum(values)
    gpu_seconds: dict[str, dict[str, float]] = {}
    generation: Counter[int] = Counter()
    training: Counter[int] = Counter()
    for outcome in outcomes:
        for role, seconds in outcome.gpu_seconds.items():
            found = gpu_seconds.setdefault(role, {})
            for kind, value in seconds.items():
                found[kind] = found.get(kind, 0.0) + value
        generation.update(outcome.staleness_generation)
        training.update(outcome.staleness_training)
    return dataclasses.replace(
        outcomes[0],
        figures=figures,
        gpu_seconds=gpu_seconds,
        staleness_generation=dict(sorted(generation.items())),
        staleness_training=dict(sorted(training.items())),
    )
