"""When a call counts as late and as hung; and that neither bends which trajectories are trained."""

import random
import statistics

import pytest

from laminar_hpc.policies.deadlines import FACTOR, FEWEST, HUNG_SECONDS, KEPT, LATE_SECONDS, Deadline


def test_nothing_is_known_at_first() -> None:
    """Only the limit holds then, however quick the first calls are."""
    deadline = Deadline(cap=30.0)
    for _ in range(FEWEST - 1):
        deadline.took(0.01)
        assert deadline.late is None and deadline.hung == 30.0
    deadline.took(0.01)
    assert (deadline.late, deadline.hung) == (LATE_SECONDS, HUNG_SECONDS)


@pytest.mark.parametrize(
    "p99, late, hung", [(0.001, 1.0, 5.0), (2.0, 2.0, 20.0), (8.0, 8.0, 30.0), (40.0, None, 30.0)]
)
def test_both_follow_the_slowest_in_a_hundred(p99: float, late: float | None, hung: float) -> None:
    """Between a floor and the limit."""
    deadline = Deadline(cap=30.0)
    for number in range(200):
        deadline.took(p99 if number % 50 == 0 else p99 / 10)
    assert (deadline.late, deadline.hung) == (late, hung)


def test_it_rises_while_it_cuts_off_too_many() -> None:
    """Calls that have become slower for good: each that is given up counts as one of twice its time, so after
    some of them they are let through. What is long past is forgotten."""
    deadline = Deadline(cap=1000.0)
    for _ in range(KEPT):
        deadline.took(0.1)
    cut = 0
    while deadline.hung < 60.0:
        deadline.given_up(deadline.hung)
        cut += 1
    assert cut < KEPT / 20
    for _ in range(KEPT):
        deadline.took(0.1)
    assert deadline.hung == HUNG_SECONDS


def _lengths(seed: int, count: int, hanging: float, grows: bool) -> tuple[list[int], list[int], int]:
    """(turns of trajectories as the policy would have them, as they end, how many began again). A call takes
    the longer the longer its trajectory is where it `grows`, and a share of calls is `hanging`."""
    rng, deadline = random.Random(seed), Deadline(cap=600.0)
    wanted, ended, again = list[int](), list[int](), 0

    def drawn() -> int:
        return 1 + int(rng.expovariate(1 / 4))

    for _ in range(count):
        wanted.append(drawn())
        turns, tries = wanted[-1], 0
        while True:
            limit = deadline.cap if tries == 2 else deadline.hung
            times = [rng.lognormvariate(0.3, 0.8) * (turns if grows else 1) for _ in range(turns)]
            # what hangs does so for a while, not for ever: on the last try it is waited for
            times = [300.0 if rng.random() < hanging else seconds for seconds in times]
            cut = next((at for at, seconds in enumerate(times) if seconds > limit), None)
            for seconds in times[:cut]:
                deadline.took(seconds)
            if cut is None:
                break
            deadline.given_up(limit)
            turns, tries, again = drawn(), tries + 1, again + 1
        ended.append(turns)
    return wanted, ended, again


def test_lengths_are_not_bent() -> None:
    """Trajectories are what is waited for, all of them: nobody takes the first k of n, which would be short
    ones. A slow one is not cut off by what its length does to its calls: deadlines are ten times the slowest
    in a hundred."""
    wanted, ended, again = _lengths(seed=5, count=4000, hanging=0.0, grows=True)
    assert again == 0 and ended == wanted
    first = statistics.mean(sorted(wanted)[: len(wanted) * 8 // 10])
    assert first < 0.75 * statistics.mean(wanted), "what first-k-of-n would have made of them"


def test_hanging_environments_hardly_bend_lengths() -> None:
    """One call in five hundred hangs: its trajectory is drawn anew, as after any death of an environment. So
    long ones, which make more calls, are drawn anew more often; they are not left out. The mean moves by less
    than that of chance."""
    wanted, ended, again = _lengths(seed=5, count=4000, hanging=0.002, grows=False)
    assert 0 < again < 0.02 * len(wanted)
    error = statistics.stdev(wanted) / len(wanted) ** 0.5
    assert abs(statistics.mean(ended) - statistics.mean(wanted)) < error
    assert FACTOR == 10.0
