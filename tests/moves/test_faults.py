"""docs/promises.md#ownership, and #nothing-lost over moves: a failure in any phase of a move ends with
the trajectory finished exactly once.

The run must end in time, with every trajectory in whole, once; what can strike stands in faults.py.
"""

from collections import Counter

import pytest

from helpers.control.sabotage import FAULTS, Saboteur, sabotaged
from helpers.emulated.stand import Shuffler, Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.trajectories import migration
from laminar_hpc.rollout import move_source
from laminar_hpc.simulator.emulated.engine import EmulatedEngine

PHASE_SECONDS, AGAIN_SECONDS, HANG_SECONDS = 1.0, 0.2, 1.5


def run(
    tmp_path, monkeypatch, seed: int, faults: int, how: str, increments: int, steps: int, share: float
) -> tuple[Stand, Saboteur]:
    monkeypatch.setattr(migration, "PHASE_SECONDS", PHASE_SECONDS)
    monkeypatch.setattr(move_source, "AGAIN_SECONDS", AGAIN_SECONDS)
    config = small_config(tmp_path, replicas=4, steps=steps, repack=how)
    config.rollout.increment_tokens = increments
    saboteur = Saboteur(seed, faults, share, HANG_SECONDS)
    stand = Stand(config, sabotaged(saboteur, EmulatedEngine), Shuffler(seed, every=0.02, at_once=8))
    stand.run(240)
    assert_every_one_ended_once(stand.config)
    return stand, saboteur


@pytest.mark.parametrize(
    "how, increments", [pytest.param("kv", 0, marks=pytest.mark.slow), ("kv", 50), ("reprefill", 50)]
)
def test_a_handful_of_faults(tmp_path, monkeypatch, how, increments):
    """A few faults in each way of moving, in every run of the tests."""
    _, saboteur = run(
        tmp_path, monkeypatch, seed=3, faults=12, how=how, increments=increments, steps=3, share=0.2
    )
    assert saboteur.struck.total() >= 6, saboteur.struck


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_180_faults_over_all_phases(tmp_path, monkeypatch):
    """Three runs of 60 faults; together they have struck in every phase, and in nearly every way (few moves
    come to the last ones)."""
    struck: Counter = Counter()
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _, saboteur = run(
            folder, monkeypatch, seed, faults=60, how="kv", increments=50 * (seed % 2), steps=24, share=0.3
        )
        struck += saboteur.struck
    missed = set(FAULTS) - set(struck)
    assert (
        struck.total() == 180
        and {where for where, _ in struck} == {where for where, _ in FAULTS}
        and len(missed) <= 4
    ), (struck, missed)
