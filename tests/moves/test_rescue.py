"""docs/promises.md#one-policy and #nothing-lost over deaths of replicas that were alone with their
weights: another one loads these from an older slot.

The engine is killed while its trajectories are on the id before the newest and nobody else generates with
that.
"""

from collections import Counter

import pytest

from helpers.control.sabotage import Killer
from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.report import rundata, summary


def refusals(tmp_path) -> int:
    """The most often that one replica refused one trajectory."""
    records = rundata.load(tmp_path / "run").records.get("move_off", [])
    refused = [(r["trajectory_id"], r["destination"]) for r in records if r["source"] is None]
    return max(Counter(refused).values(), default=0)


def run(tmp_path, most: int, slots: int) -> tuple[Killer, list[dict], dict, int]:
    """The killer, every rescue, the summary's figures, and the known tokens that were lost."""
    config = small_config(tmp_path, replicas=3, steps=7)
    config.rollout.increment_tokens, config.relay.slots = 25, slots
    config.emulation.time_scale = 10.0  # who is killed has not ended meanwhile, on a busy machine neither
    stand = Stand(config)
    killer = stand.each_turn = Killer(stand.kill, most, tokens=2500, every=0.5)
    stand.run(200)
    found = assert_every_one_ended_once(stand.config)
    moves = [
        move for move in rundata.load(tmp_path / "run").records.get("move", []) if move["source"] is None
    ]
    for move in moves:
        assert found[move["trajectory_id"]].attempt > 0
    return killer, moves, summary.build(tmp_path / "run"), killer.lost(moves, found)


def test_work_goes_on_with_weights_that_are_loaded_from_an_older_slot(tmp_path):
    """Whatever of it is lost on the way is counted: a trajectory goes on with what was known of it, or what
    was known is discarded."""
    killer, moves, figures, lost = run(tmp_path, most=3, slots=3)
    by_load = [move for move in moves if move["loaded"]]
    assert killer.killed and by_load, (killer.killed, moves)
    assert figures["trajectories_rescued_by_load"] == len(by_load) and figures["trajectories_rescued"] == len(
        moves
    )
    assert refusals(tmp_path) <= len(killer.killed), (
        "what a replica last reported is no reason to ask it again and again"
    )
    assert figures["tokens_discarded"] >= lost and figures["max_versions_per_trajectory"] == 1


@pytest.mark.slow
def test_with_two_slots_it_starts_again(tmp_path):
    """The older one is the one to be written next."""
    killer, moves, figures, _ = run(tmp_path, most=3, slots=2)
    assert killer.killed and not any(move["loaded"] for move in moves) and figures["tokens_discarded"] > 0
