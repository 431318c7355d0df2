"""The order of prompts is a function of seed and count alone."""

from laminar_hpc.policies.sampling import prompt_index


def test_every_pass_holds_every_row_once_and_differs():
    """No prompt twice in a pass; a resumed run that knows only the count goes on in the same order."""
    first = [prompt_index(i, 50, 7, True) for i in range(50)]
    second = [prompt_index(i, 50, 7, True) for i in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != [prompt_index(i, 50, 8, True) for i in range(50)]
    assert [prompt_index(i, 50, 7, False) for i in range(52)] == [*range(50), 0, 1]
