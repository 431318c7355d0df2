"""What is generated: lengths of responses, prompts and turns, group by group, from a distribution or from a
file of real lengths.

A group's lengths depend on the seed and its index alone, never on who generates it or when, so pipelines are
compared on the same work. Where prompts come again, those of one prompt are as alike in all passes as in one.
"""

import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.policies.sampling import prompt_index
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.turns.course import Course, Known, even
from laminar_hpc.store.run_files import config_of
from laminar_hpc.store.store_copy import ReadableStore, readable_store

_BLOCK = 256  # groups drawn at once
_NORMAL = NormalDist()


def capped_mean(mu: float, sigma: float, cap: float) -> float:
    """Mean of min(cap, exp(N(mu, sigma)))."""
    place = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma * sigma / 2) * _NORMAL.cdf(place - sigma) + cap * (1.0 - _NORMAL.cdf(place))


def mu_of_mean(mean: float, sigma: float, cap: float) -> float:
    """The log-median at which the capped log-normal has this mean. Raises LaminarError if none gives it."""
    if not 1.0 <= mean < cap:
        raise LaminarError(
            f"workload.mean_response_tokens={mean:g} must lie between 1 and "
            f"workload.max_response_tokens={cap:g}"
        )
    low, high = -20.0, math.log(cap) + 6 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if capped_mean(middle, sigma, cap) < mean else (low, middle)
    return low


@dataclass
class GroupDraw:
    """One prompt group: per sample the drawn tokens of each turn, and its course where it has several."""

    turns: Sequence[Sequence[int]]
    prompt_tokens: int
    courses: Sequence[Course] = ()


class Workload:
    """`groups`: how many the whole run will use about, for the drift. `lengths`: response tokens of each
    group, over again where there are more groups, in place of what the configuration says; `known`: the same
    of what has several turns."""

    def __init__(
        self,
        config: WorkloadConfig,
        seed: int,
        groups: int,
        lengths: list[list[int]] | None = None,
        known: Known | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.groups = max(1, groups)
        self.known = known
        self._known = lengths or (read_lengths(Path(config.lengths_file)) if config.lengths_file else [])
        if not self._known:
            self._mu = mu_of_mean(config.mean_response_tokens, config.sigma, config.max_response_tokens)
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def prompt(self, index: int) -> int:
        """Whose the samples of group `index` are: a row of the data, in a new order in each pass."""
        return (
            prompt_index(index, self.config.prompts, self.seed, shuffle=True)
            if self.config.prompts
            else index
        )

    @cached_property
    def _of_prompts(self) -> np.ndarray:
        """What the log-lengths of a prompt's samples have in common, in standard deviations: [prompts]."""
        return np.random.default_rng([self.seed, 4]).standard_normal(self.config.prompts)

    def lengths(self, index: int) -> list[int]:
        """Response tokens (int, >= 1) of each sample of group `index`; environment tokens are not counted."""
        if self._known:
            row = self._known[index % len(self._known)]
            return [max(1, row[i % len(row)]) for i in range(self.config.samples_per_prompt)]
        return self._block(index)[0][index % _BLOCK].tolist()

    def group(self, index: int) -> GroupDraw:
        c = self.config
        if c.turns <= 1 and self.known is None:
            return GroupDraw([(n,) for n in self.lengths(index)], c.prompt_tokens)
        courses = [self.course(index, sample) for sample in range(c.samples_per_prompt)]
        return GroupDraw([course.drawn for course in courses], c.prompt_tokens, courses)

    def course(self, index: int, sample: int, tries: int = 1) -> Course:
        """Of a sample of group `index` with several turns, in its first try or another one."""
        if self.known is not None:
            return self.known.course(index, sample, self.seed, tries)
        (_, turns, waits), at = self._block(index), (index % _BLOCK, sample)
        return even(self.lengths(index)[sample], int(turns[at]), self.config.turn_tokens, waits[at].tolist())

    def _block(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of _BLOCK groups: lengths (int64, [block, samples]), turns (the same) and waits (seconds, [block,
        samples, turns - 1])."""
        number = index // _BLOCK
        if number not in self._blocks:
            c, samples = self.config, self.config.samples_per_prompt
            random = np.random.default_rng([self.seed, number])
            shared = random.standard_normal((_BLOCK, 1))
            if c.prompts:
                rows = [self.prompt(i) for i in range(number * _BLOCK, (number + 1) * _BLOCK)]
                shared = self._of_prompts[rows, None]
            z = math.sqrt(c.group_correlation) * shared + math.sqrt(
                1 - c.group_correlation
            ) * random.standard_normal((_BLOCK, samples))
            progress = np.minimum(1.0, (np.arange(_BLOCK) + number * _BLOCK) / self.groups)[:, None]
            drift = math.log1p(c.growth) * progress
            mu = 0.0 if self._known else self._mu
            lengths = np.clip(np.rint(np.exp(mu + drift + c.sigma * z)), 1, c.max_response_tokens).astype(
                np.int64
            )
            calls = random.integers(1, c.turns + 1, (_BLOCK, samples))
            waits = c.turn_seconds * np.exp(
                c.turn_sigma * random.standard_normal((_BLOCK, samples, max(0, c.turns - 1)))
            )
            if c.turn_hung:
                waits[random.random(waits.shape) < c.turn_hung] = math.inf
            self._blocks = {k: v for k, v in self._blocks.items() if k >= number - 64}
            self._blocks[number] = (lengths, calls, waits)
        return self._blocks[number]


@cache
def read_lengths(path: Path) -> list[list[int]]:
    """Real lengths, one list per group: of a run directory's or a store's trajectories, or of a file with one
    JSON list per line. They are read once: all simulations of a command have the same, also of a run that
    goes on.

    Raises LaminarError when there are none.
    """
    kept = readable_store(path, config_of(path).get("store_dir")) if path.is_dir() else ReadableStore(path)
    store = kept.path
    try:
        if store.suffix == ".sqlite":
            database = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
            with database:
                rows = database.execute(
                    "SELECT group_id, response_length FROM trajectories "
                    "WHERE state IN ('finished', 'consumed') ORDER BY id"
                ).fetchall()
            database.close()
            groups: dict[int, list[int]] = {}
            for group, length in rows:
                groups.setdefault(group, []).append(int(length))
            lengths = list(groups.values())
        else:
            lengths = [
                [int(n) for n in json.loads(line)] for line in store.read_text().splitlines() if line.strip()
            ]
    except (OSError, sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise LaminarError(
            f"workload.lengths_file={path}: neither a run "
            f"directory nor lines of JSON lists of lengths ({error})"
        ) from None
    lengths = [row for row in lengths if row]
    if not lengths:
        raise LaminarError(
            f"workload.lengths_file={path}: no lengths in it; name a run with finished trajectories"
        )
    return lengths
