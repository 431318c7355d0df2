"""Whole published runs, simulated from their recipes alone (bench/simulator_runs.py)."""

import importlib

import pytest

from helpers.paths import BENCH
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.tables import MODELS


@pytest.fixture
def load(monkeypatch):
    """Imports a bench as its own command line would."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.mark.parametrize("version", ["0.3", "0.4"])
def test_steps_of_dense_models_take_as_long_as_published(load, version):
    """Promise: within 20%, NeMo RL on 8 to 64 H100, and so do generation, updates and log-probs where each is
    published."""
    bench = load("simulator_runs")
    rows = [r for r in bench.NEMO if r.version == version and not MODELS[r.model].experts]
    assert len(rows) >= 3
    for recipe in rows:
        figures = bench.simulated(recipe)
        assert figures["step_seconds"] == pytest.approx(recipe.seconds, rel=0.2), recipe
        if recipe.phases:
            assert bench.phases(recipe, figures) == pytest.approx(recipe.phases, rel=0.2), recipe


@pytest.mark.slow
def test_steps_of_all_published_runs(load):
    """Within 20% on average, dense models and models with experts of 0.3 to 0.6."""
    bench = load("simulator_runs")
    errors = [abs(bench.simulated(recipe)["step_seconds"] / recipe.seconds - 1) for recipe in bench.NEMO]
    assert sum(errors) / len(errors) < 0.2 and max(errors) < 0.5


def test_the_launches_of_experts_take_what_the_fit_gives(load):
    """And no row of a published run was among what it was fitted to."""
    fit = load("simulator_experts")
    assert fit.expert_launch(DEFAULT) == pytest.approx(DEFAULT.expert_launch_seconds, rel=0.02)


def test_the_largest_models_take_as_long_as_published_and_in_the_same_order(load):
    """Promise: within 25%, engines over two and four machines and weights for all of them at once: Qwen3-235B
    and DeepSeek-V3 of NeMo RL 0.6 on 128 to 512 H100, asynchronous ones faster than synchronous ones."""
    bench = load("simulator_runs")
    for model in ("Qwen3-235B-A22B", "DeepSeek-V3"):
        rows = [r for r in bench.NEMO if r.version == "0.6" and r.model == model]
        found = {recipe: bench.simulated(recipe)["step_seconds"] for recipe in rows}
        assert len(found) == 3
        for recipe, seconds in found.items():
            assert seconds == pytest.approx(recipe.seconds, rel=0.25), recipe
        assert sorted(rows, key=lambda r: r.seconds) == sorted(rows, key=found.get)
