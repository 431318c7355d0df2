"""The divergence guard's decisions: ordinary runs pass, what cannot be ordinary does not."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.config.learning_schema import GuardConfig
from laminar_hpc.policies.divergence import BEGIN, TOLERATED_MISMATCH, Divergence, Guarded, GuardVerdict

# Two updates a step, of 128 trajectories each, on the shipped models on two CPU cores: step; smallest, 25%,
# 50%, 75%, 99% and largest mismatch of a trajectory; entropy and mean ratio of the step; mean reward.
ORDINARY = json.loads(Path(__file__).with_name("ordinary_runs.json").read_text())
COUNTS = (32, 32, 32, 30, 1, 1)  # of trajectories at these places

DEFAULTS = {
    "mismatch_max": 1.0,
    "ratio_max": 1000.0,
    "spread": 10.0,
    "window": 40,
    "skip_share": 0.25,
    "stop_after": 3,
}


def guard(**others: float) -> Divergence:
    return Divergence(**{**DEFAULTS, **others})


def trajectories(mismatches: list[float], log_ratio: float = 0.1) -> list[Guarded]:
    return [Guarded(i, mismatch, log_ratio) for i, mismatch in enumerate(mismatches)]


def recorded(row: list[float]) -> list[Guarded]:
    """A mini-batch of an ordinary run."""
    return trajectories([m for m, count in zip(row[:6], COUNTS, strict=True) for _ in range(count)])


def figures_of(row: list[float]) -> dict[str, float]:
    return {"entropy": row[6], "ratio": row[7], "reward": row[8]}


def usual(draw: random.Random) -> tuple[list[Guarded], dict[str, float]]:
    """A mini-batch as ordinary runs have it."""
    mismatches = [min(0.19, 10 ** draw.gauss(-2.7, 0.5)) for _ in range(16)]
    figures = {
        "ratio": 10 ** draw.gauss(0, 0.001),
        "entropy": 10 ** draw.gauss(-0.5, 0.1),
        "reward": draw.gauss(0.6, 0.06),
    }
    return trajectories(mismatches), figures


def after(updates: int) -> Divergence:
    """A guard that has seen so many ordinary mini-batches."""
    policy, draw = guard(), random.Random(1)
    for step in range(updates):
        assert policy.judge(step, *usual(draw), 0.05) == GuardVerdict({})
    return policy


@pytest.mark.parametrize("run", ORDINARY)
def test_a_recorded_run_is_not_stopped(run: str) -> None:
    """Promise: with the defaults of `guard`, in runs with staleness whose reward rises from 0.55 to 0.96 and
    whose entropy falls from 0.4 to 0.01, no update is skipped, and less than one trajectory in 4,000 is left
    out."""
    policy, left = guard(), 0
    for step, *row in ORDINARY[run]:
        verdict = policy.judge(step, recorded(row), figures_of(row), 0.04)
        assert not verdict.skip
        left += len(verdict.left_out)
    assert left < len(ORDINARY[run]) * 128 / 4000
    assert {name: getattr(GuardConfig(), name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("begins", [0, 7, 30, 45])
@pytest.mark.parametrize("run", ORDINARY)
def test_a_divergence_in_a_recorded_run_ends_it_within_three_steps(run: str, begins: int) -> None:
    """Promise: mismatches 500 times as large, from any step on and on both sides of the first update."""
    policy = guard()
    for step, *row in ORDINARY[run]:
        factor = 1 if step < begins else 500
        batch = [t._replace(mismatch=factor * max(t.mismatch, 1e-3)) for t in recorded(row)]
        if (verdict := policy.judge(step, batch, figures_of(row), 0.04)).stop:
            break
    assert verdict.stop and begins <= step < begins + 3


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_ordinary_figures_change_nothing(seed: int) -> None:
    """Promise: a run whose figures scatter as usual loses no trajectory and no update, and as it learns
    neither: entropy falls by a half every 20 updates, reward rises, mismatch follows staleness."""
    policy, draw = guard(), random.Random(seed)
    for step in range(120):
        batch, figures = usual(draw)
        stale = min(step, 3) / 3 + 1e-4
        batch = [t._replace(mismatch=t.mismatch * stale) for t in batch]
        figures["entropy"] *= 0.5 ** (step / 20)
        figures["reward"] += step / 400
        assert policy.judge(step, batch, figures, 0.05) == GuardVerdict({})


@pytest.mark.parametrize("worst", [TOLERATED_MISMATCH * 1.01, 30.0, math.inf, math.nan])
def test_one_bad_trajectory_is_left_out_and_the_others_are_trained(worst: float) -> None:
    """Promise: by its own mismatch, also before there is a band, and no more than it."""
    for policy in (guard(), after(20)):
        verdict = policy.judge(20, trajectories([1e-3] * 15 + [worst]), {"entropy": 0.3}, 0.0)
        assert verdict.left_out.keys() == {15} and not verdict.skip and not verdict.stop


def test_a_ratio_is_bounded_too() -> None:
    """Promise: by algorithm's most dangerous token, whatever the mean is."""
    batch = [*trajectories([1e-3] * 15), Guarded(15, 0.01, math.log(1001))]
    assert "importance ratio" in guard().judge(0, batch, {}, 0.0).left_out[15]
    batch[-1] = Guarded(15, 0.01, math.log(999))
    assert guard().judge(0, batch, {}, 0.0).left_out == {}


def test_a_run_that_is_always_stale_has_a_wider_band() -> None:
    """Promise: what is usual in a run is not left out, up to guard.mismatch_max."""
    policy, draw = guard(), random.Random(2)
    noisy = [draw.uniform(0.05, 0.19) for _ in range(16)]
    for step in range(BEGIN):
        assert policy.judge(step, trajectories(noisy), {}, 0.0) == GuardVerdict({})
    assert policy.limits.mismatch > 0.4
    assert policy.judge(9, trajectories([*noisy, 0.4]), {}, 0.0) == GuardVerdict({})
    assert policy.judge(9, trajectories([*noisy, 1.1]), {}, 0.0).left_out.keys() == {16}


def test_too_many_skip_the_update_and_several_of_these_end_the_run() -> None:
    """Promise: the third skipped update in a row ends the run, with the figure and the trajectories."""
    policy = after(10)
    bad = trajectories([1e-3] * 11 + [0.5, 0.9, 4.0, 3.0, 2.0])
    for step, stops in ((10, False), (11, False), (12, True)):
        verdict = policy.judge(step, bad, {"entropy": 0.3}, 0.0)
        assert verdict.left_out.keys() == {11, 12, 13, 14, 15} and bool(verdict.stop) == stops
        assert verdict.skip == (
            "5 of 16 trajectories are left out: log-prob mismatch above 0.3 nats, the worst "
            "trajectory 13 (4), trajectory 14 (3), trajectory 15 (2)"
        )
    assert verdict.stop.startswith("3 of the last 6 updates were skipped, the last at step 13: 5 of 16")


def test_a_skipped_update_between_good_ones_ends_no_run() -> None:
    """Promise: of 6 updates 2 may be skipped, for ever; 3 may not, also where good ones stand between."""
    policy, draw = after(10), random.Random(3)
    bad = trajectories([5.0] * 16)
    for step in range(60):
        batch, figures = (bad, {"entropy": 0.3}) if step % 3 == 0 else usual(draw)
        verdict = policy.judge(step, batch, figures, 0.05)
        assert bool(verdict.skip) == (step % 3 == 0) and not verdict.stop
    verdicts = [policy.judge(60 + i, *(usual(draw) if i % 2 else (bad, {})), 0.05) for i in range(5)]
    assert verdicts[-1].stop


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("entropy", 12.0, "the entropy is 12, outside its usual band"),
        ("entropy", 1e-4, "the entropy is 0.0001, outside its usual band"),
        ("ratio", 4.0, "the mean importance ratio is 4, outside"),
        ("ratio", 0.2, "the mean importance ratio is 0.2, outside"),
        ("reward", -0.8, "the mean reward is -0.8, outside"),
        ("kl", 6.0, "the KL divergence from the reference is 6, outside"),
        ("entropy", math.nan, "the entropy is nan"),
        ("kl", math.inf, "the KL divergence from the reference is inf"),
    ],
)
def test_a_figure_outside_its_band_skips_the_update(name: str, value: float, words: str) -> None:
    """Promise: the figure is named, with its band; before there is a band only what is not finite counts."""
    policy, young, draw = guard(), guard(), random.Random(4)
    for step in range(20):
        batch, figures = usual(draw)
        assert policy.judge(step, batch, figures | {"kl": 0.05}, 0.05) == GuardVerdict({})
    batch, figures = usual(draw)
    assert words in policy.judge(20, batch, figures | {"kl": 0.05, name: value}, 0.05).skip
    assert bool(young.judge(0, batch, figures | {name: value}, 0.05).skip) == (not math.isfinite(value))


def test_a_mismatch_that_grows_in_all_trajectories_is_seen() -> None:
    """Promise: also where no trajectory alone is beyond its limit."""
    verdict = after(20).judge(20, trajectories([0.15] * 16), {"entropy": 0.3}, 0.0)
    assert verdict.skip.startswith("the median log-prob mismatch is 0.15, outside its usual band (0.0")
    assert "of 16 trajectories from 0 to 15" in verdict.skip


def test_what_is_good_is_no_alarm() -> None:
    """Promise: a higher reward, a smaller mismatch and a reward that is always the same end nothing."""
    policy = guard()
    for step in range(30):
        figures = {"reward": 1.0 + (step > 20), "entropy": 0.3}
        assert policy.judge(
            step, trajectories([0.1 if step < 15 else 1e-9] * 4), figures, 0.0
        ) == GuardVerdict({})


@settings(max_examples=40)
@given(
    figures=st.lists(
        st.tuples(
            st.lists(st.floats(0, 3, width=32), min_size=1, max_size=6),
            st.floats(1e-6, 20),
            st.floats(-2, 2),
        ),
        min_size=1,
        max_size=40,
    ),
    cut=st.integers(0, 39),
)
def test_a_resume_in_the_middle_decides_the_same(
    figures: list[tuple[list[float], float, float]], cut: int
) -> None:
    """Invariant: equal figures give equal verdicts, also through a checkpoint's JSON; skipped updates move no
    band; nothing follows a stop but stops."""
    policy, resumed = guard(window=8), guard(window=8)
    stopped = False
    for step, (mismatches, entropy, reward) in enumerate(figures):
        if step == cut and not stopped:
            resumed = guard(window=8)
            resumed.take_state(json.loads(json.dumps(policy.state)))
        before = policy.state["history"]
        arguments = (step, trajectories(mismatches), {"entropy": entropy, "reward": reward}, 0.0)
        verdict = policy.judge(*arguments)
        assert resumed.judge(*arguments) == verdict
        assert not verdict.skip or stopped or bool(verdict.stop) or policy.state["history"] == before
        assert not stopped or verdict.stop
        assert not verdict.stop or verdict.skip
        stopped = bool(verdict.stop)


def test_after_a_stop_a_resume_begins_with_a_new_band() -> None:
    """Promise: whoever goes on after a stop is not stopped at once by what was usual before."""
    policy = after(20)
    for step in range(3):
        verdict = policy.judge(step, trajectories([5.0] * 4), {}, 0.0)
    assert verdict.stop and policy.state == {"history": {}, "skipped": []}
