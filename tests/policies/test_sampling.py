"""The order of prompts is a function of seed and count alone; how many samples a prompt gets is one of their
accuracies alone."""

from laminar_hpc.policies.filtering import PATIENCE_BATCHES, PATIENCE_GROUPS, exhausted, reason, zero_variance
from laminar_hpc.policies.sampling import GroupSize, prompt_index, worth_a_batch


def test_every_pass_holds_every_row_once_and_differs():
    """No prompt twice in a pass; a resumed run that knows only the count goes on in the same order."""
    first = [prompt_index(i, 50, 7, True) for i in range(50)]
    second = [prompt_index(i, 50, 7, True) for i in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [prompt_index(i, 50, 8, True) for i in range(50)]
    assert [prompt_index(i, 50, 7, False) for i in range(52)] == [*range(50), 0, 1]


def test_more_samples_only_while_all_are_wrong():
    """AERO: 8 first, 2 more at a time up to 16 while all are wrong; the last round is cut to what is left."""
    size = GroupSize(8, 2, 16)
    assert [size.granted_next([0.0] * n) for n in (8, 10, 14, 15, 16)] == [2, 2, 2, 1, 0]
    assert (
        size.granted_next([0.0] * 7 + [1.0])
        == size.granted_next([1.0] * 8)
        == size.granted_next([0.0] * 9 + [0.5])
        == 0
    )
    assert GroupSize(8, 2, 8).granted_next([0.0] * 8) == 0, "all at once: never more"


def test_a_small_rest_waits_for_the_scores_of_the_last_batch():
    """Otherwise filtered groups and later rounds trickle out in batches of one."""
    assert [worth_a_batch(ready, 32, True) for ready in (0, 0.25, 15, 16, 40)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert [worth_a_batch(ready, 32, False) for ready in (0, 0.25, 32)] == [False, True, True]


def test_saved_against_always_the_most():
    """The samples a group did without, at the mean length of its own."""
    assert GroupSize(8, 2, 16).saved([10, 20] * 4) == (8, 120.0)
    assert GroupSize(8, 2, 16).saved([5] * 16) == (0, 0.0)


def test_zero_variance_groups():
    """Equal rewards are recognised, named, and end a run only after long."""
    assert zero_variance([0.25, 0.25, 0.25]) and not zero_variance([0.0, 0.0, 0.1])
    assert reason([0.0] * 8) == "all 8 rewards are 0" and reason([0.25] * 2) == "all 2 rewards are 0.25"
    assert exhausted(PATIENCE_BATCHES * 32, 32) and not exhausted(PATIENCE_BATCHES * 32 - 1, 32)
    assert exhausted(PATIENCE_GROUPS, 1) and not exhausted(PATIENCE_GROUPS - 1, 1)
