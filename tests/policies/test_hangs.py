"""A rank is stuck when it stands still for far longer than any has before, and never because somebody else
did."""

from laminar_hpc.policies.hangs import FACTOR, HangWatch


def watch() -> HangWatch:
    return HangWatch({"train": 10.0, "load": 100.0}, first=200.0)


def said(watch: HangWatch, rank: int, phase: str, times: list[float], count: int = 0) -> int:
    for time in times:
        count += 1
        watch.heard(rank, phase, count, time)
    return count


def looked(watch: HangWatch, begin: float, end: float) -> float | None:
    """When it is found stuck, by looks once a second."""
    times = [begin + i for i in range(int(end - begin))]
    return next((time for time in times if watch.look(time) is not None), None)


def test_the_limit_follows_the_longest_pause_so_far() -> None:
    """Short pauses leave the floor, long ones raise the limit, of all ranks together; what has never ended
    has the first limit."""
    w = watch()
    assert w.limit("train") == w.limit("load") == 200.0
    said(w, 0, "train", [0.0, 1.0, 2.0])
    assert w.limit("train") == 10.0
    said(w, 1, "train", [0.0, 30.0])
    assert w.limit("train") == FACTOR * 30.0 and w.limit("load") == 200.0
    assert watch().look(1000.0) is None


def test_a_rank_that_stands_still_is_named_with_what_it_does() -> None:
    """And the others, which wait for it, are not."""
    w = watch()
    said(w, 0, "train", [0.0, 1.0, 2.0])
    said(w, 1, "wait", [0.0, 1.0, 2.5])
    assert looked(w, 2.0, 1000.0) == 13.0
    stuck = w.look(13.0)
    assert stuck is not None and (stuck.rank, stuck.phase, stuck.seconds) == (0, "train", 11.0)
    w.forget()
    assert looked(w, 14.0, 1000.0) is None and w.limit("train") == 10.0


def test_repeated_words_are_no_progress_and_waiting_is_no_hang() -> None:
    """A ping that says the same again changes nothing; who waits for the controller may wait for long."""
    w = watch()
    count = said(w, 0, "train", [0.0, 1.0])
    for second in range(2, 30):
        w.heard(0, "train", count, float(second))
    assert looked(w, 1.0, 100.0) == 12.0
    w.heard(0, "wait", count + 1, 101.0)
    assert looked(w, 101.0, 5000.0) is None


def test_a_controller_that_stood_still_blames_nobody() -> None:
    """It has heard nothing because it did not listen."""
    w = watch()
    said(w, 0, "train", [0.0, 1.0, 2.0])
    assert w.look(3.0) is None and w.look(63.0) is None
    assert looked(w, 64.0, 1000.0) == 74.0
