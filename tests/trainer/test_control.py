"""The trainer ranks' words to each other: over one group, each wait bounded."""

from helpers.trainer.ranks import Ranks


def test_all_is_said_over_one_group(ranks: Ranks) -> None:
    """Batches, slices and checkpoints of two ranks: one mesh of sockets, not one for each."""
    told = ranks.run(2, "cases:speak")
    for each in told:
        assert each["first"] == b"batch" and each["frames"] == [b"", b"xxx"] and each["groups"] == 1
        assert each["texts"] == ["rank 0", "rank 1"] and each["agreed"] == "damaged"
        assert (
            each["left"] == "" or "waited at most 1 s for the other trainer ranks at batch 7" in each["left"]
        )
    assert [bool(each["left"]) for each in told] == [False, True]
