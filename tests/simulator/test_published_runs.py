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
