"""Prompts that are put into order and kept for a replica: whatever comes and goes, each draw is used once."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.controller.trajectories.upcoming import Upcoming
from laminar_hpc.policies.dispatch import DrawOrder, ExpectedLengths
from laminar_hpc.store.store import Store

EVENTS = st.lists(
    st.tuples(st.sampled_from(["take", "keep", "gone", "starts"]), st.integers(0, 3)), max_size=60
)


ROWS = 7


def order(block: int = 1, known: dict[int, int] | None = None) -> DrawOrder:
    """Of ROWS prompts, the lengths of some of which are `known`."""
    lengths = ExpectedLengths()
    for prompt, length in (known or {}).items():
        lengths.finished(prompt, [length])
    return DrawOrder(lengths, lambda draw: draw % ROWS, ROWS, block)


class Kept:
    """What a store keeps."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def get(self, key: str, default: int) -> int:
        return int(self.values.get(key, default))

    def get_text(self, key: str) -> str:
        return self.values.get(key, "")

    def put(self, key: str, value: int) -> None:
        self.values[key] = str(value)

    def put_text(self, key: str, value: str) -> None:
        self.values[key] = value


@given(EVENTS, st.integers(1, 9), st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 99)))
@settings(deadline=None)
def test_each_draw_is_used_once(events: list[tuple[str, int]], block: int, known: dict[int, int]) -> None:
    """By replicas that come and go, and controllers that start again: none twice, whatever is known of
    lengths, and those that were kept for nothing come first. A replica gets what was kept for it."""
    store = Kept()
    upcoming = Upcoming(store, order(block, known))  # type: ignore[arg-type]
    used, kept = list[int](), dict[int, list[int]]()
    for what, replica in events:
        if what == "take":
            draw = upcoming.take(replica)
            if kept.get(replica):
                assert draw == kept[replica].pop(0)
            used.append(draw)
        elif what == "keep":
            before = kept.get(replica, [])
            kept[replica] = upcoming.keep(replica, 2)
            assert kept[replica][: len(before)] == before
        elif what == "gone":
            upcoming.release(replica)
            kept.pop(replica, None)
        else:
            upcoming, kept = Upcoming(store, order(block, known)), {}  # type: ignore[arg-type]
        upcoming.save()
        assert upcoming.used == len(used) == len(set(used)) == store.get("prompts_drawn", -1)
    for replica in list(kept):
        upcoming.release(replica)
    used += [upcoming.take(9) for _ in store.get_text("prompts_kept").split()]
    assert sorted(used) == list(range(len(used))), "one is left out"


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path) -> None:
    """A run without environments has one number in its store, as before."""
    store = Store(tmp_path)
    upcoming = Upcoming(store, order(block=4))
    assert [upcoming.take(replica) for replica in (0, 1, 0)] == [0, 1, 2]
    upcoming.save()
    assert store.get("prompts_drawn", 0) == 3 and store.get_text("prompts_kept") == ""
    store.close()


def test_a_controller_that_starts_again_goes_on_in_the_same_order(tmp_path: Path) -> None:
    """What was in order and not given out is in the store, so a resumed run gives out what one without a
    stop would have."""
    known = {prompt: 10 + prompt * prompt % 5 for prompt in range(ROWS)}
    straight = order(5, known)
    wanted = [straight.take(2) for _ in range(3 * ROWS)]
    store, found = Store(tmp_path), list[int]()
    for count in (3, 1, 6, 11):
        upcoming = Upcoming(store, order(5, known))
        found += [upcoming.take(0, 2) for _ in range(count)]
        upcoming.save()
    assert found == wanted and found != sorted(found)
    store.close()
