"""Process groups cost threads that wake all the time: a trainer rank is in few of one rank alone."""

from pathlib import Path

from helpers.trainer.ranks import Ranks


def test_a_rank_alone_makes_no_group(ranks: Ranks, tied_model: Path) -> None:
    """The world is the only one."""
    assert ranks.run(1, "cases:groups_of", model=str(tied_model), settings={}) == [[[0]]]


def test_groups_of_one_rank_are_one(ranks: Ranks, tied_model: Path) -> None:
    """Where a size is 1, every group of this kind has one rank."""
    told = ranks.run(2, "cases:groups_of", model=str(tied_model), settings={"trainer__tensor_parallel": 2})
    assert [[of for of in groups if len(of) == 1] for groups in told] == [[[0]], [[1]]]
