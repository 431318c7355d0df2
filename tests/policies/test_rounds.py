"""Rounds of a barrier: all that are there begin together, and nobody is waited for who has gone."""

from collections.abc import Collection

from laminar_hpc.policies.rounds import Rounds


def begins(
    rounds: Rounds,
    replica: int,
    idle: dict[int, int],
    newest: int,
    active_replicas: Collection[int],
    minimum: int = 1,
) -> bool:
    """Whether it does when these are idle."""
    rounds.look(idle, newest, active_replicas, minimum)
    return rounds.may_begin(replica)


def test_a_round_opens_when_all_are_idle_on_the_newest_weights():
    """Each takes one batch of it; the next one needs all of them again."""
    rounds, active_replicas = Rounds(), {0, 1}
    assert not begins(rounds, 0, {0: 5}, 5, active_replicas)
    assert not begins(rounds, 0, {0: 5, 1: 4}, 5, active_replicas)
    assert begins(rounds, 0, {0: 5, 1: 5}, 5, active_replicas)
    rounds.took(0)
    assert not begins(rounds, 0, {0: 5}, 5, active_replicas) and begins(rounds, 1, {1: 5}, 5, active_replicas)
    rounds.took(1)
    assert not begins(rounds, 1, {1: 6}, 6, active_replicas)


def test_nobody_waits_for_one_that_has_left():
    """With three replicas of which one dies in a round and one before the next, the last one goes on."""
    rounds, active_replicas = Rounds(), {0, 1, 2}
    assert begins(rounds, 0, {0: 1, 1: 1, 2: 1}, 1, active_replicas)
    rounds.took(0)
    rounds.leave([2])
    assert not begins(rounds, 2, {1: 1}, 1, {0, 1})
    rounds.leave([1])
    assert begins(rounds, 0, {0: 2}, 2, {0})


def test_one_that_comes_takes_part_in_the_next_round():
    """It is waited for as soon as it is in the crew, and gets nothing of the round before."""
    rounds = Rounds()
    assert begins(rounds, 0, {0: 1}, 1, {0})
    rounds.took(0)
    assert not begins(rounds, 7, {7: 1}, 1, {0, 7})
    assert begins(rounds, 7, {0: 2, 7: 2}, 2, {0, 7}) and begins(rounds, 0, {0: 2, 7: 2}, 2, {0, 7})


def test_the_first_round_waits_for_the_minimum():
    """However many of them are idle."""
    assert not begins(Rounds(), 0, {0: 1}, 1, {0}, minimum=2)
    assert begins(Rounds(), 0, {0: 1, 1: 1}, 1, {0, 1}, minimum=2)
