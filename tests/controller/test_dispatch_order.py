"""Which prompts the controller grants first: what their responses taught it in the first pass decides in the
second, the same after a restart, and each prompt is granted once a pass."""

from pathlib import Path

from helpers.made import trajectory
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store.store import Store

LENGTHS = [30, 10, 80, 20, 70, 50, 40, 60]  # response tokens of each prompt
PROMPTS = [Prompt(f"{i}+1=", [i], {"n": i}) for i in range(len(LENGTHS))]


def begin(folder: Path, block: int = 4) -> tuple[Store, TrajectoryTracker]:
    """A controller's store and tracker, as it starts or starts again."""
    store = Store(folder)
    tracker = TrajectoryTracker(
        store, PROMPTS, GroupSize(2, 1, 2), lambda draw: draw % len(PROMPTS), block=block
    )
    tracker.recover()
    return store, tracker


def grant(store: Store, tracker: TrajectoryTracker, batches: int) -> list[int]:
    """The prompts of so many local batches of two groups, which all finish at once."""
    prompts = []
    for _ in range(batches):
        for group in tracker.draw(2, 2, replica=0, weight_id=0, weight_step=0, now=0.0):
            prompts.append(tracker.groups[group.group_id].prompt_index)
            finish(tracker, group, LENGTHS[prompts[-1]])
        store.commit()
    return prompts


def finish(tracker: TrajectoryTracker, group: PromptGroup, length: int) -> None:
    for sample in group.samples:
        report = trajectory(group, sample)
        report.length = length
        tracker.generated(report, 0)
        tracker.scored(sample.trajectory_id, sample.attempt, 1.0, {"accuracy": 1.0}, "", 3.0)


def test_the_second_pass_goes_by_the_lengths_of_the_first(tmp_path: Path) -> None:
    """Of each block of four the longest and the shortest are one local batch, and the two between them the
    other; no prompt leaves its block."""
    store, tracker = begin(tmp_path)
    assert grant(store, tracker, 4) == list(range(8))
    assert grant(store, tracker, 4) == [2, 1, 0, 3, 4, 6, 7, 5]
    store.close()


def test_a_controller_that_starts_again_knows_the_lengths(tmp_path: Path) -> None:
    """Wherever the one before ended, also in the middle of a block, the order is that of a run without a
    stop."""
    store, tracker = begin(tmp_path / "straight")
    wanted = grant(store, tracker, 16)
    store.close()
    found = []
    for _ in range(16):
        store, tracker = begin(tmp_path / "stopped")
        found += grant(store, tracker, 1)
        store.close()
    assert found == wanted
    passes = [sorted(found[i : i + 8]) for i in range(0, 32, 8)]
    assert passes == [list(range(8))] * 4


def test_in_order_is_the_order_of_the_draws(tmp_path: Path) -> None:
    store, tracker = begin(tmp_path, block=1)
    assert grant(store, tracker, 8) == [*range(8), *range(8)]
    assert store.get_text("prompts_kept") == ""
    store.close()
