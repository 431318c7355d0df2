"""How long responses will be in the steps that a run has left."""

import random
from types import SimpleNamespace

import pytest

from laminar_hpc.simulator.finished.courses import Played, Turns
from laminar_hpc.simulator.finished.length_trend import lengths_ahead
from laminar_hpc.simulator.turns.course import Course, Known, Took

LONGEST = 200


def trained(steps: int, reasoned: float, more: float = 0.0) -> list[SimpleNamespace]:
    """Of 64 responses a step, this share is of some 100 tokens at first, and `more` of them with each step;
    the others have 10, and one has 180."""
    noise, found = random.Random(2), []
    for step in range(steps):
        lengths = [180] + [
            noise.randint(80, 120) if noise.random() < reasoned + more * step else 10 for _ in range(63)
        ]
        found += [
            SimpleNamespace(id=step * 64 + i, consumed_step=step, response_length=n)
            for i, n in enumerate(lengths)
        ]
    return found


def mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths)


def test_short_answers_turn_into_long_ones_and_the_longest_stays():
    """Promise: what grows is what has grown. As more answers of a batch are reasoned the mean goes on, to
    what the next steps really have, and the longest of each step stays as long as it was."""
    rows = trained(16, 0.1, 0.02)
    ahead = lengths_ahead(rows, 4, LONGEST)
    now = [row.response_length for row in rows]
    then = [row.response_length for row in trained(20, 0.1, 0.02) if row.consumed_step >= 16]
    assert mean(list(ahead.values())) == pytest.approx(mean(then), rel=0.1)
    assert mean(then) > 1.2 * mean(now)
    assert max(ahead.values()) == max(now) == 180


def test_a_step_that_has_lost_most_of_its_trajectories_changes_little():
    """Promise: quantiles are as fine as a whole step gives them, whatever a filter left of another."""
    rows = trained(16, 0.1, 0.02)
    ahead, less = (lengths_ahead(some, 4, LONGEST) for some in (rows, rows[: 15 * 64 + 4]))
    assert mean(list(less.values())) == pytest.approx(mean(list(ahead.values())), rel=0.1)


def test_without_a_trend_nothing_is_changed():
    """Promise: of lengths that stay, of a few steps, and where no steps are left."""
    assert lengths_ahead(trained(16, 0.3), 20, LONGEST) == {}
    assert lengths_ahead(trained(5, 0.1, 0.1), 20, LONGEST) == {}
    assert lengths_ahead(trained(16, 0.1, 0.02), 0, LONGEST) == {}
    assert lengths_ahead(trained(16, 0.1, 0.02), -3, LONGEST) == {}


@pytest.mark.parametrize(("slope", "least", "most"), [(50, 10, LONGEST), (-50, 1, 900)])
def test_lengths_keep_within_their_limits(slope, least, most):
    """Promise: between one token and the maximum, however steep the trend is."""
    rows = [
        SimpleNamespace(id=step * 8 + i, consumed_step=step, response_length=450 + slope * (step - 8) + i)
        for step in range(16)
        for i in range(8)
    ]
    ahead = lengths_ahead(rows, 100, LONGEST if slope > 0 else 900)
    assert len(ahead) == len(rows) and least <= min(ahead.values()) <= max(ahead.values()) <= most
    assert {LONGEST if slope > 0 else 1} <= set(ahead.values())


def test_turns_grow_with_their_response():
    """Promise: of a trajectory with several turns each has as many times the tokens; what its environment
    gave stays."""
    course = Course([10, 20], [7], [1], [Took(1.0)], opening=3)
    turns = Turns({5: Played(5, 0, course, ())}, Known([[course]], [Took(1.0)], []))
    scaled = turns.scaled({5: 1.5})
    ((found,),) = scaled.known.groups
    assert (found.drawn, found.given, found.opening) == ([15, 30], [7], 3)
    assert scaled.known.calls == turns.known.calls
