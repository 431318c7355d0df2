"""What was granted and has not begun: all of it is known, may be dropped, and keeps the weights it needs."""

import pytest

from laminar_hpc.line.messages.data import Partial, PromptGroup, Sample
from laminar_hpc.line.messages.rollouts import Grant
from laminar_hpc.rollout.grants import Grants
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.weights.slots import SlotGone


class Loader:
    """Which weights are held; those of id 9 are gone."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def hold(self, weight_id: int) -> None:
        if weight_id == 9:
            raise SlotGone("9 is gone")
        self.held = [weight_id]

    def let_go(self) -> None:
        self.held = []


def grant(batch: int, weight_id: int, *ids: int, evaluation: str = "", parts: bool = False) -> Grant:
    group = PromptGroup(batch, [1], "p", {}, [Sample(number, 0) for number in ids])
    made = Grant(batch, weight_id, 0, [group], 1.0, 8, evaluation)
    made.parts = {number: Partial() for number in ids} if parts else {}
    return made


def known(grants: Grants) -> list[int]:
    return [work.trajectory_id for work in grants.trajectories if not work.is_dropped()]


@pytest.fixture
def grants() -> Grants:
    state = ReplicaState()
    state.begin_pull(5)
    state.verified(5)
    state.open(2)
    return Grants(state, Loader())  # type: ignore[arg-type]


def test_all_is_known_until_it_has_begun(grants: Grants) -> None:
    """In order, with the works of the one whose weights are being loaded; what is dropped is not begun."""
    for each in (grant(1, 5, 10, 11), grant(2, 5, 20, evaluation="held"), grant(3, 5, 30, 31)):
        grants.add(each)
    assert known(grants) == [10, 11, 20, 30, 31] and grants.newest_batch == 3
    first = grants.take()
    begun = grants.begin(first)
    assert known(grants) == [10, 11, 20, 30, 31]
    grants.drop({(30, 0), (31, 1)})
    grants.drop_beginning(lambda work: work.trajectory_id == 10)
    grants.drop_evaluations()
    assert known(grants) == [11, 31] and [work.is_dropped() for work in begun] == [True, False]
    grants.begun(first)
    assert known(grants) == [31] and grants
    assert grants.begin(grants.take())[0].trajectory_id == 31 and not grants


def test_older_weights_are_held(grants: Grants) -> None:
    """From a grant that goes back to them until its works have begun; one whose weights are gone does not
    wait, and is the newest all the same."""
    loader = grants._weight_loader
    back = grant(1, 3, 10, parts=True)
    grants.add(grant(2, 5, 20, parts=True))
    assert not loader.held, "those are open"  # type: ignore[attr-defined]
    grants.add(back)
    assert grants.loads(back) and loader.held == [3]  # type: ignore[attr-defined]
    with pytest.raises(SlotGone):
        grants.add(grant(4, 9, 40, parts=True))
    assert grants.newest_batch == 4 and known(grants) == [20, 10]
    grants.begin(back)
    grants.begun(back)
    assert not loader.held  # type: ignore[attr-defined]
