"""Whole published runs, simulated from their recipes alone (bench/simulator_runs.py)."""

import importlib
from pathlib import Path

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.tables import MODELS


@pytest.fixture
def load(monkeypatch):
    """Imports a bench as its own command line would."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    return importlib.import_module


def test_steps_of_dense_models_take_as_long_as_published(load):
    """Promise: within 20%, NeMo RL on 16 to 64 H100, synchronous and one step off."""
    bench = load("simulator_runs")
    dense = [recipe for recipe in bench.NEMO if not MODELS[recipe.model].experts]
    assert len(dense) == 8
    for recipe in dense:
        found = bench.simulated(recipe)["step_seconds"]
        assert found == pytest.approx(recipe.seconds, rel=0.2), recipe


def test_the_launches_of_experts_take_what_the_fit_gives(load):
    """And no row of a published run was among what it was fitted to."""
    fit = load("simulator_fit")
    assert fit.expert_launch(DEFAULT) == pytest.approx(DEFAULT.expert_launch_seconds, rel=0.02)
