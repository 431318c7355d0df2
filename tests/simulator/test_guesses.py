"""Speculation in the simulator: it pays where the weights' reading is what takes time, and never costs."""

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs, faster
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.speculation import DRAFTED, TOKENS_PER_STEP, speculating
from laminar_hpc.simulator.sweep import point
from laminar_hpc.simulator.tables import GPUS, MODELS

PLAIN = engine_costs(MODELS["7B"], GPUS["H100"], 1, DEFAULT)
GUESSING = speculating(PLAIN)


def test_a_step_that_verifies_reads_the_weights_once() -> None:
    """One request: as long as a plain step, for twice the tokens."""
    assert GUESSING.at(1) == pytest.approx(PLAIN.at(1) / TOKENS_PER_STEP, rel=1e-6)
    assert GUESSING.at(8) == pytest.approx(PLAIN.at(8 * (1 + DRAFTED)) / TOKENS_PER_STEP)


def test_it_is_off_where_it_does_not_pay() -> None:
    """At 2,048 requests four times the products for twice the tokens: steps stay plain; nowhere is a token
    slower than without."""
    assert GUESSING.at(2048) == PLAIN.at(2048)
    assert all(GUESSING.at(n) <= PLAIN.at(n) for n in range(1, 2049))


def test_a_faster_machine_guesses_as_well() -> None:
    """Rates alone change."""
    assert faster(GUESSING, 2.0) == speculating(faster(PLAIN, 2.0))


def test_a_simulated_run_is_faster_by_its_tail() -> None:
    """Promise: `speculation=true` reaches the engines of `laminar sim`, and is refused where its cost is not
    known."""
    words = ["model=7B", "cuda_graphs=true", "steps=3", "warmup_steps=1", "workload.prompts_per_step=64"]
    runs = [
        point(load_simulation("laminar", [*words, f"speculation={on}"]), "laminar", 64, 16, 3)
        for on in ("false", "true")
    ]
    plain, guessing = (run.figures["tokens_per_second"] for run in runs)
    assert 1.1 < guessing / plain < TOKENS_PER_STEP
    with pytest.raises(LaminarError, match="needs cuda_graphs=true"):
        load_simulation("laminar", ["speculation=true"])
