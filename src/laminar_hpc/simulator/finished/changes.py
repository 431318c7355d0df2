"""Which other settings would have made a finished run faster on the same GPUs: split, pipeline, staleness
bound, local batch and repack, each tried by simulation on top of the best so far.

Settings that `laminar train` would refuse are left out, and so are gains that are too small to be told from
errors of the simulation.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar_hpc.config.check import check
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.memory import shared_engines
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.simulator.finished.measured import Figures, Measured
from laminar_hpc.simulator.finished.prediction import predict
from laminar_hpc.simulator.rules import PIPELINES

GAIN_MIN = 0.03  # of tokens/s, below which a change is not worth a word
_STALENESS_MAX = 8
_Say = Callable[[str], None]
_Settings = dict[str, object]


@dataclass(frozen=True)
class Change:
    """`words`: overrides of `laminar train`; `figures`: the run as simulated with them."""

    words: tuple[str, ...]
    figures: Figures

    def over(self, other: Figures) -> float:
        """The gain in tokens/s over another prediction, as a share."""
        return self.figures.tokens_per_second / other.tokens_per_second - 1.0


def best_of_each(measured: Measured, now: Figures, say: _Say = lambda line: None) -> list[Change]:
    """Of each setting the best value alone, where it gains anything worth it; the best one first. `now`: the
    prediction of the run as it was."""
    found = [_best(measured, now, measured.config, (), options, say) for options in _OPTIONS]
    return sorted((change for change in found if change), key=lambda change: -change.over(now))


def best_together(measured: Measured, now: Figures, say: _Say = lambda line: None) -> list[Change]:
    """The best single change, the best one on top of it, and so on until nothing is worth it."""
    config, words, figures, found = measured.config, tuple[str, ...](), now, list[Change]()
    while True:
        tried = [_best(measured, figures, config, words, options, say) for options in _OPTIONS]
        changes = [change for change in tried if change]
        if not changes:
            return found
        best = max(changes, key=lambda change: change.figures.tokens_per_second)
        config, words, figures = changed(measured.config, best.words), best.words, best.figures
        found.append(best)


def single_changes(config: RunConfig) -> list[tuple[str, ...]]:
    """Every option of every setting alone that a start would take."""
    allowed = _wrong(config)
    words = [option for options in _OPTIONS for option in options(config)]
    return [option for option in words if _wrong(changed(config, option)) <= allowed]


def changed(config: RunConfig, words: tuple[str, ...]) -> RunConfig:
    """A copy with the overrides that this file makes."""
    other = copy.deepcopy(config)
    for word in words:
        key, _, value = word.partition("=")
        if key == "pipeline":
            preset = PIPELINES["laminar_no_repack"]
            settings: _Settings = {
                f"pipeline.{name}": getattr(preset, name)
                for name in ("refresh", "max_staleness", "consumption", "keep_kv", "repack")
            }
        else:
            settings = {key: int(value) if value.isdigit() else None if value == "null" else value}
        for name, setting in settings.items():
            section, _, field = name.partition(".")
            setattr(getattr(other, section), field, setting)
    return other


def _best(
    measured: Measured,
    now: Figures,
    config: RunConfig,
    words: tuple[str, ...],
    options: Callable[[RunConfig], Iterator[tuple[str, ...]]],
    say: _Say,
) -> Change | None:
    """The fastest of the options of one setting, on top of `words`, if it is worth it."""
    best: Change | None = None
    allowed = _wrong(measured.config)
    for option in options(config):
        keys = {word.partition("=")[0] for word in option}
        all_words = (*(word for word in words if word.partition("=")[0] not in keys), *option)
        other = changed(measured.config, all_words)
        if not _wrong(other) <= allowed:
            continue
        change = Change(all_words, predict(measured, other))
        say(f"{' '.join(all_words)}: {change.figures.tokens_per_second:,.0f} tokens/s")
        if change.over(now) >= GAIN_MIN and (best is None or change.over(best.figures) > 0):
            best = change
    return best


def _wrong(config: RunConfig) -> set[str]:
    """What a start would refuse, but for data and reward."""
    try:
        check(dataclasses.replace(config, dry_run=True))
    except LaminarError as error:
        return set(str(error).splitlines())
    return set()


def _splits(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Data-parallel ranks and replicas that take as many GPUs together as now; none where they share some."""
    t, r = config.trainer, config.rollout
    if t.devices or r.devices or shared_engines(config):
        return
    copy_of_model = t.replica_ranks
    total = copy_of_model * t.data_parallel + r.most * r.tensor_parallel
    for ranks in range(1, total // copy_of_model + 1):
        left = total - ranks * copy_of_model
        if ranks != t.data_parallel and left >= r.tensor_parallel and left % r.tensor_parallel == 0:
            yield f"trainer.data_parallel={ranks}", f"rollout.replicas={left // r.tensor_parallel}"


def _pipelines(config: RunConfig) -> Iterator[tuple[str, ...]]:
    if config.pipeline.refresh == "barrier":
        yield ("pipeline=laminar",)


def _bounds(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Larger bounds on staleness, of pipelines that have one and are not synchronous."""
    bound = config.pipeline.max_staleness
    if isinstance(bound, int) and bound:
        for more in (1, 2, 4):
            if bound + more <= _STALENESS_MAX:
                yield (f"pipeline.max_staleness={bound + more}",)


def _local_batches(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Half, a quarter and the double of what a replica is granted at once."""
    if config.pipeline.refresh != "drained":
        return
    groups = config.algorithm.prompts_per_step
    default = math.ceil(groups / config.rollout.most)
    now = config.pipeline.local_batch_groups or default
    for other in sorted({max(1, now // 4), max(1, now // 2), min(groups, 2 * now), default} - {now}):
        yield (f"pipeline.local_batch_groups={'null' if other == default else other}",)


def _repacks(config: RunConfig) -> Iterator[tuple[str, ...]]:
    if config.pipeline.refresh == "drained" and config.rollout.most > 1:
        for repack in {"off", "auto"} - {config.pipeline.repack}:
            yield (f"pipeline.repack={repack}",)


_OPTIONS = (_splits, _pipelines, _bounds, _local_batches, _repacks)
