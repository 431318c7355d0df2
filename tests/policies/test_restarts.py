"""Restarts end: by a limit per hour, and at once when the same death repeats without progress."""

from laminar_hpc.policies.restarts import Restarts


def test_so_many_in_any_hour():
    """Promise: at most N restarts in any 3600 s; older ones no longer count."""
    restarts = Restarts(2)
    assert restarts.refusal("a", 1, 0.0) == "" and restarts.refusal("b", 2, 1800.0) == ""
    assert "restarts=2" in restarts.refusal("c", 3, 3599.0)
    assert restarts.refusal("d", 4, 3601.0) == ""
    assert "within the last hour" in restarts.refusal("e", 5, 3602.0)


def test_the_same_death_twice_without_progress_is_the_last():
    """Promise: a failure that repeats is not tried a third time, whatever process ids it names; progress or
    another cause make it a new one."""
    restarts = Restarts(100)
    assert restarts.refusal("trainer 0 (pid 71) has died", 5, 0.0) == ""
    assert restarts.refusal("trainer 0 (pid 99) has died", 6, 1.0) == ""
    assert restarts.refusal("relay 0 (pid 99) has died", 6, 2.0) == ""
    assert "also after step 6" in restarts.refusal("relay 0 (pid 104) has died", 6, 3.0)


def test_never_by_default():
    """Promise: restarts=0 starts nothing again."""
    assert Restarts(0).refusal("x", 0, 0.0)


def test_a_cause_that_is_gone_says_nothing_about_another_try():
    restarts = Restarts(3)
    assert [restarts.refusal("no room", 7, float(now), gone=True) for now in range(3)] == [""] * 3
    assert "so many restarts" in restarts.refusal("no room", 7, 3.0, gone=True)
    assert "the same happened before" in restarts.refusal("no room", 7, 4.0)
