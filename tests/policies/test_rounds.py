"""Rounds of a barrier: all that are there begin together, and nobody is waited for who has gone."""

from laminar_hpc.policies.rounds import Rounds


def test_a_round_opens_when_all_are_idle_on_the_newest_weights():
    """Each takes one batch of it; the next one needs all of them again."""
    rounds, crew = Rounds(), {0, 1}
    assert not rounds.may_begin(0, {0: 5}, 5, crew)
    assert not rounds.may_begin(0, {0: 5, 1: 4}, 5, crew)
    assert rounds.may_begin(0, {0: 5, 1: 5}, 5, crew)
    rounds.took(0)
    assert not rounds.may_begin(0, {0: 5}, 5, crew) and rounds.may_begin(1, {1: 5}, 5, crew)
    rounds.took(1)
    assert not rounds.may_begin(1, {1: 6}, 6, crew)


def test_nobody_waits_for_one_that_has_left():
    """With three replicas of which one dies in a round and one before the next, the last one goes on."""
    rounds, crew = Rounds(), {0, 1, 2}
    assert rounds.may_begin(0, {0: 1, 1: 1, 2: 1}, 1, crew)
    rounds.took(0)
    rounds.leave([2])
    assert not rounds.may_begin(2, {1: 1}, 1, {0, 1})
    rounds.leave([1])
    assert rounds.may_begin(0, {0: 2}, 2, {0})


def test_one_that_comes_takes_part_in_the_next_round():
    """It is waited for as soon as it is in the crew, and gets nothing of the round before."""
    rounds = Rounds()
    assert rounds.may_begin(0, {0: 1}, 1, {0})
    rounds.took(0)
    assert not rounds.may_begin(7, {7: 1}, 1, {0, 7})
    assert rounds.may_begin(7, {0: 2, 7: 2}, 2, {0, 7}) and rounds.may_begin(0, {0: 2, 7: 2}, 2, {0, 7})


def test_the_first_round_waits_for_the_minimum():
    """However many of them are idle."""
    assert not Rounds().may_begin(0, {0: 1}, 1, {0}, minimum=2)
    assert Rounds().may_begin(0, {0: 1, 1: 1}, 1, {0, 1}, minimum=2)
