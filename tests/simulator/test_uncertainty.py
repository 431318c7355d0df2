"""Ranges of predictions: drawn constants, the same for all rows, kept in a file, and wider than nothing."""

import dataclasses
import random

import pytest

from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.sweep import sweep
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.uncertainty import SPREAD, Rates, draw, interval, spreads, student

SMALL = [
    "workload.prompts_per_step=16",
    "workload.samples_per_prompt=4",
    "workload.updates_per_step=2",
    "workload.mean_response_tokens=500",
    "workload.max_response_tokens=2000",
    "steps=3",
    "warmup_steps=1",
    "gpus=[16]",
    "trainer_share=0.5",
    "pipelines=[laminar]",
]


def range_of(tmp_path, *words: str) -> tuple[float, float, float]:
    config = load_simulation("laminar", [*SMALL, *words])
    (row,) = sweep(config, cache=tmp_path / "ranges.json")
    figures = row["outcome"].figures
    return tuple(figures[f"tokens_per_second{end}"] for end in ("_low", "", "_high"))


def test_draws_are_those_of_their_number_and_within_bounds():
    """Promise: the same constants for every row of a sweep, and none that could not be configured."""
    assert draw(3, 0) == draw(3, 0) != draw(4, 0) and draw(3, 0) != draw(3, 1)
    names = {field.name for field in dataclasses.fields(Constants)}
    assert set(SPREAD) <= names
    for number in range(200):
        for name, value in draw(number, 0).items():
            (field,) = (field for field in dataclasses.fields(Constants) if field.name == name)
            assert field.metadata["laminar"].hold(value), (name, value)


@pytest.mark.parametrize("draws", [2, 4, 8, 32])
def test_the_range_holds_eight_in_ten_further_draws(draws):
    """Promise: 80% means 80%, however few draws the range is made of, where logs of rates are normal."""
    chance, inside = random.Random(0), 0
    for _ in range(20_000):
        *values, fresh = (chance.lognormvariate(1.0, 0.2) for _ in range(draws + 1))
        low, high = interval(values, values[0])
        inside += low <= fresh <= high
    assert inside / 20_000 == pytest.approx(0.8, abs=0.02)


def test_the_range_holds_the_prediction():
    """Also where all draws are on one side, and where there is one."""
    low, high = interval([6.0, 7.0], 5.0)
    assert low <= 5.0 and high > 7.0
    assert interval([7.0], 5.0) == pytest.approx((5.0, 7.0))


@pytest.mark.parametrize(("freedom", "table"), [(1, 3.078), (2, 1.886), (3, 1.638), (7, 1.415), (30, 1.310)])
def test_quantiles_of_student(freedom, table):
    """As in any table of the two-sided 80%."""
    assert student(freedom) == pytest.approx(table, rel=0.004)


def test_what_has_been_tried_less_is_less_certain():
    """Promise: experts and GPUs other than H100 and H800 widen the range; draws of the same number differ in
    nothing else."""
    dense, experts = MODELS["32B"], MODELS["Qwen3-30B-A3B"]
    found = [
        spreads(model, [GPUS[gpu]])["generation_error"]
        for model, gpu in ((dense, "H100"), (experts, "H100"), (dense, "H20"), (experts, "H20"))
    ]
    assert found == sorted(found) and found[0] == SPREAD["generation_error"] < found[1]
    wide = draw(3, 0, spreads(experts, [GPUS["H20"]]))
    changed = {name for name, value in draw(3, 0).items() if wide[name] != value}
    assert changed == {"generation_error", "training_error"}


def test_a_prediction_has_a_range(tmp_path):
    """Promise: low < rate < high, by the seed; no draws, no range; a constant that is given is certain."""
    low, rate, high = range_of(tmp_path)
    assert low < rate <= high and high > 1.01 * low
    assert range_of(tmp_path) == (low, rate, high)
    assert range_of(tmp_path, "draws=0") == (rate, rate, rate)
    known = [f"constants.{name}={getattr(DEFAULT, name):.17g}" for name in SPREAD]
    assert range_of(tmp_path, *known) == pytest.approx((rate, rate, rate))


def test_rates_are_kept(tmp_path):
    """Promise: the same sweep is told again without its draws; a file that is no cache is written anew."""
    file = tmp_path / "rates.json"
    file.write_text("[1")
    rates, calls = Rates(file), []
    for _ in range(2):
        assert rates.of(["a"], lambda: calls.append(1) or 5.0) == 5.0
    rates.save()
    assert Rates(file).of(["a"], lambda: calls.append(1) or 6.0) == 5.0 and len(calls) == 1
    assert Rates(file).of(["b"], lambda: 7.0) == 7.0


def test_rates_of_an_entry_that_has_changed_are_not_kept(tmp_path, monkeypatch):
    """Promise: who changes a GPU in a table of one's own gets the ranges of the GPU as it is."""
    kept = range_of(tmp_path)
    monkeypatch.setitem(GPUS, "H800", dataclasses.replace(GPUS["H800"], hbm=GPUS["H800"].hbm / 4))
    changed = range_of(tmp_path)
    assert changed == range_of(tmp_path / "anew") != kept
