"""How long responses will be in the steps that a run has left, as learning makes them longer or shorter.

Not all grow alike: often short answers turn into reasoned ones while the longest stay as they are. So a line
over the steps is fitted to each quantile of a step's lengths. It is followed to the newest step, and beyond
it with a slope that is multiplied by DAMPING at each step (Gardner and McKenzie, Forecasting trends in time
series, Management Science 31, 1985), as no response grows for ever.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from laminar_hpc.report.rundata import Consumed

DAMPING = 0.85
SURE = 2.5  # standard errors of a slope; a smaller one counts as none
_STEPS_MIN = 8  # that a line is fitted to


def lengths_ahead(trained: Sequence[Consumed], steps: int, longest: int) -> dict[int, int]:
    """Trajectory id -> response tokens, 1 to `longest`, that one at its place among those of its step has on
    average over the `steps` steps to come. Empty where the mean length has no trend, or no steps are left."""
    by_step = defaultdict[int, list[Consumed]](list)
    for t in trained:
        by_step[t.consumed_step].append(t)
    if steps < 1 or len(by_step) < _STEPS_MIN:
        return {}
    at = np.array(sorted(by_step), float)
    rows = [np.array([t.response_length for t in by_step[int(step)]], float) for step in at]
    quantiles = np.linspace(0.0, 1.0, max(map(len, rows)))
    lengths = np.array([np.quantile(row, quantiles) for row in rows])
    if not _slopes(at, lengths.mean(axis=1, keepdims=True)).any():
        return {}
    beyond = np.cumsum(DAMPING ** np.arange(1, steps + 1)).mean()
    then = lengths.mean(axis=0) + _slopes(at, lengths) * (at[-1] - at.mean() + beyond)
    then = np.maximum.accumulate(then.clip(1, longest))
    found = dict[int, int]()
    for step, row in zip(at, rows, strict=True):
        places = row.argsort(kind="stable").argsort() / max(1, len(row) - 1)
        moved = np.interp(places, quantiles, then).round()
        found |= {t.id: int(length) for t, length in zip(by_step[int(step)], moved, strict=True)}
    return found


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of each column of `y` [steps, columns], by least squares; 0 where it cannot be told from none."""
    x, y = x - x.mean(), y - y.mean(axis=0)
    slopes = x @ y / (x @ x)
    rest = y - np.outer(x, slopes)
    errors = np.sqrt((rest * rest).sum(axis=0) / (len(x) - 2) / (x @ x))
    return np.where(abs(slopes) > SURE * errors, slopes, 0.0)
