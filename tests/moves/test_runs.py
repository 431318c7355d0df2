"""Moves in whole emulated runs: trajectories end exactly once, in whole, under one policy, however often they
change their replica."""

import pytest

from helpers.emulated.stand import PROMPT_TOKENS, Shuffler, Stand, assert_every_one_ended_once, small_config
from laminar_hpc.policies import repack
from laminar_hpc.report import rundata


@pytest.mark.parametrize("how", ["kv", pytest.param("reprefill", marks=pytest.mark.slow)])
def test_trajectories_move_and_every_one_ends_once(tmp_path, how):
    """With `kv` the prefix comes along and prompt and response are not prefilled again; with `reprefill`
    nothing of it does."""
    stand = Stand(small_config(tmp_path, repack=how), each_turn=Shuffler(seed=1))
    stand.run(90)
    found = assert_every_one_ended_once(stand.config)
    moves = rundata.load(tmp_path / "run").records.get("move", [])
    assert len(moves) >= 3, "hardly anything moved"
    last = {move["trajectory_id"]: move for move in moves}
    for trajectory_id, move in last.items():
        t = found[trajectory_id]
        assert (
            t.replica == move["destination"]
            and t.moves == sum(m["trajectory_id"] == trajectory_id for m in moves) == t.attempt
        )
        whole = move["tokens"] + PROMPT_TOKENS
        assert whole - 1 <= move["prefix_tokens"] <= whole if how == "kv" else move["prefix_tokens"] == 0
    assert {t.attempt for i, t in found.items() if i not in last} == {0}


@pytest.mark.parametrize(
    ("first_move_seconds", "moves"), [(0.001, True), pytest.param(60.0, False, marks=pytest.mark.slow)]
)
def test_a_run_moves_its_tails_where_that_pays(tmp_path, monkeypatch, first_move_seconds, moves):
    """pipeline.repack=auto: by the engines' own curve and the run's own lengths, and not where a move costs
    more than a tail."""
    monkeypatch.setattr(repack, "FIRST_MOVE_SECONDS", first_move_seconds)
    stand = Stand(small_config(tmp_path, steps=2))
    stand.config.emulation.time_scale = 5.0
    assert stand.config.pipeline.repack == "auto"
    stand.run(90)
    assert_every_one_ended_once(stand.config)
    plans = rundata.load(tmp_path / "run").records.get("repack", [])
    assert bool(plans) is moves and all(plan["trajectories"] > 0 for plan in plans)
