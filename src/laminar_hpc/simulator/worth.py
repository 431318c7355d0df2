"""What a mechanism is worth, asked directly: a run beside the same run without it, or with other staleness
bounds.

    laminar sim EXPERIMENT --without repack,relays    the whole, without each of them, and without both
    laminar sim EXPERIMENT --staleness 0,1,2,4,8      the same run at each bound

All runs of a table have the same split, that of the whole, and the same lengths: SEEDS times over, as what
happens to end first may tip a short run by some percent. A gain is the mean over these pairs, with its
standard error.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from laminar_hpc.config.errors import LaminarError, did_you_mean
from laminar_hpc.machine.observability import console
from laminar_hpc.simulator.mechanisms import MECHANISMS
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import SimulationConfig
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.sweep import Told, setup_of, simulated, split

SEEDS = 4
_SEED = 7919  # between two of them
_FIGURES = (
    *("tokens_per_second", "step_seconds", "trainer_wait_share", "rollout_idle_share"),
    "staleness_training_mean",
)
_HEAD = (
    *("pipeline", "GPUs", "run", "tokens/s", "first over it", "step s"),
    *("trainer waits", "rollouts idle", "staleness"),
)


@dataclass(frozen=True)
class WorthRow:
    """A run of the table, means over seeds. `gain`: tokens/s of the first run of its pipeline and scale over
    its own, less one; `error`: the standard error of that."""

    pipeline: str
    gpus: int
    run: str
    gain: float
    error: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Setting:
    """A pipeline at a scale. `trainer`: GPUs of the trainer of each group."""

    config: SimulationConfig
    pipeline: str
    gpus: int
    trainer: int

    def setup(self, left_out: tuple[str, ...], seed: int, bound: float | None = None) -> SimulationSetup:
        """The run without some mechanisms."""
        config = replace(self.config, seed=seed)
        config = config if bound is None else replace(config, max_staleness=bound)
        for name in left_out:
            config = MECHANISMS[name].config(config)
        each = self.gpus // config.trainer_groups
        made = setup_of(config, self.pipeline, each, self.trainer, config.steps)
        for name in left_out:
            made = MECHANISMS[name].setup(made)
        return made

    def has(self, name: str) -> bool:
        return self.setup((name,), 0) != self.setup((), 0)

    def figures(self, left_out: tuple[str, ...], bound: float | None = None) -> list[dict[str, float]]:
        """Of each seed."""
        seeds = [self.config.seed + _SEED * number for number in range(SEEDS)]
        made = [self.setup(left_out, seed, bound) for seed in seeds]
        return [simulated(self.config, each, self.config.trainer_groups).figures for each in made]


def names_of(given: list[str]) -> list[str]:
    """The mechanisms that `--without` names, separated by commas or given one by one. Raises LaminarError."""
    names = list(dict.fromkeys(name for word in given for name in word.split(",") if name))
    for name in names:
        if name not in MECHANISMS:
            known = ", ".join(f"{key} ({each.about})" for key, each in MECHANISMS.items())
            raise LaminarError(f"--without={name}{did_you_mean(name, list(MECHANISMS))}: use some of {known}")
    return names


def bounds_of(given: str) -> list[float]:
    """The bounds that `--staleness` names. Raises LaminarError."""
    try:
        bounds = [float(word) for word in given.split(",")]
    except ValueError:
        bounds = [-1.0]
    if not bounds or not all(0 <= bound <= 1000 for bound in bounds):
        raise LaminarError(f"--staleness={given}: numbers from 0 to 1000 separated by commas, as 0,1,2,4,8")
    return bounds


def without(config: SimulationConfig, names: list[str], told: Told) -> list[WorthRow]:
    """For each pipeline and scale the whole, without each of `names` that it has, and without all of these.
    Raises LaminarError for one that no pipeline has."""
    used, rows = set[str](), list[WorthRow]()
    for setting in _settings(config):
        here = [name for name in names if setting.has(name)]
        used |= set(here)
        runs = {"whole": partial(setting.figures, ())}
        runs |= {f"without {name}": partial(setting.figures, (name,)) for name in here}
        if len(here) > 1:
            runs[f"without all {len(here)}"] = partial(setting.figures, tuple(here))
        rows += _rows(setting, runs, told)
    if unused := [name for name in names if name not in used]:
        where = f"no pipeline of {', '.join(config.pipelines)} has it in this experiment"
        raise LaminarError(f"--without={unused[0]} ({MECHANISMS[unused[0]].about}): {where}")
    return rows


def at_bounds(config: SimulationConfig, bounds: list[float], told: Told) -> list[WorthRow]:
    """For each pipeline with a bound of its own and each scale the run at every bound; gains are of the first
    one over the others. Raises LaminarError where all are synchronous."""
    asked = [name for name in config.pipelines if PIPELINES[name].max_staleness != 0]
    if not asked:
        raise LaminarError(f"--staleness: {', '.join(config.pipelines)} train what was just generated")
    rows = list[WorthRow]()
    for setting in _settings(replace(config, pipelines=asked)):
        runs = {f"bound {bound:g}": partial(setting.figures, (), bound) for bound in bounds}
        rows += _rows(setting, runs, told)
    return rows


def _settings(config: SimulationConfig) -> Iterator[Setting]:
    for gpus in config.gpus:
        for pipeline in config.pipelines:
            yield Setting(config, pipeline, gpus, split(config, pipeline, gpus // config.trainer_groups))


def _rows(
    setting: Setting, runs: Mapping[str, Callable[[], list[dict[str, float]]]], told: Told
) -> Iterator[WorthRow]:
    first = list[float]()
    for name, simulate_it in runs.items():
        found = simulate_it()
        first = first or [figures["tokens_per_second"] for figures in found]
        means = {key: statistics.fmean(figures[key] for figures in found) for key in _FIGURES}
        gains = [a / b["tokens_per_second"] - 1.0 for a, b in zip(first, found, strict=True)]
        told(f"{setting.pipeline} on {setting.gpus} GPUs, {name}: {means['tokens_per_second']:,.0f} tokens/s")
        error = statistics.stdev(gains) / len(gains) ** 0.5
        yield WorthRow(setting.pipeline, setting.gpus, name, statistics.fmean(gains), error, means)


def table(rows: list[WorthRow]) -> str:
    lines = [list(_HEAD)]
    for row in rows:
        rate, step, waits, idle, staleness = (row.figures[key] for key in _FIGURES)
        gain = f"{row.gain:+.1%} ± {row.error:.1%}" if row.gain or row.error else ""
        figures = [f"{rate:,.0f}", gain, f"{step:,.1f}", f"{waits:.0%}", f"{idle:.0%}", f"{staleness:.1f}"]
        lines.append([row.pipeline, str(row.gpus), row.run, *figures])
    return "\n".join(console.table(lines, left=(0, 2)))
