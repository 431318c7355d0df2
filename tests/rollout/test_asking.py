"""When a replica asks for work: near the controller when it has drained, elsewhere a little before."""

from types import SimpleNamespace

import pytest

from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.line.messages.rollouts import Grant, RequestWork
from laminar_hpc.rollout import asking
from laminar_hpc.rollout.asking import Asking
from laminar_hpc.rollout.grants import Grants
from laminar_hpc.rollout.state import ReplicaState


class Replica:
    """Serves weight id 3; id 4 is in the slots. A trajectory ends each 10 ms, an answer takes 80."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        self.now, self.said = 0.0, list[RequestWork]()
        monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.state = ReplicaState()
        self.state.begin_pull(3)
        self.state.verified(3)
        self.state.open(3)
        config = SimpleNamespace(
            cluster=SimpleNamespace(place=place), pipeline=SimpleNamespace(refresh="drained")
        )
        context = SimpleNamespace(channel=SimpleNamespace(send=self.said.append))
        batch = SimpleNamespace(config=config, context=context, state=self.state)
        held = SimpleNamespace(hold=lambda _: None, let_go=lambda: None)
        self.grants = Grants(self.state, held, None, asking.asks_ahead(config))  # type: ignore[arg-type]
        self.asking = Asking(batch, self.grants, lambda: 4)  # type: ignore[arg-type]

    def batch(self, size: int) -> None:
        """Is asked for, granted and generated."""
        self.asking.ask(3)
        self.now += 0.08
        self.asking.granted()
        self.state.grant(3, size)
        for _ in range(size):
            self.now += 0.01
            self.state.finished()
            self.asking.ended()
        self.asking.drained()


@pytest.mark.parametrize(("place", "ahead"), [("", []), ("paris", [True])])
def test_only_far_away_it_asks_before_it_has_drained(monkeypatch, place, ahead):
    """For the newest weights, in the second local batch, when it knows how long an answer takes."""
    replica = Replica(monkeypatch, place)
    replica.batch(100)
    assert [each.ahead for each in replica.said] == [False]
    replica.said.clear()
    replica.batch(100)
    assert [each.ahead for each in replica.said[1:]] == ahead
    assert all(each.weight_id == 4 for each in replica.said[1:])


def test_a_grant_ahead_is_begun_with_its_own_weights(monkeypatch):
    """Nearby one on weights that are not open is refused, as it crossed a pull."""
    group = PromptGroup(0, [1], "p", {}, [Sample(1, 0)])
    grant = Grant(1, 4, 4, [group], 1.0, 8)
    assert Replica(monkeypatch, "paris").grants.loads(grant)
    assert not Replica(monkeypatch, "").grants.loads(grant)


def test_an_answer_is_timed_from_the_first_request(monkeypatch):
    """One that is drained asks again while the answer to its request ahead is on its way, and may be granted
    something that it has not asked for: neither makes an answer seem fast."""
    replica = Replica(monkeypatch, "paris")
    replica.asking.granted()
    replica.asking.ask(3, ahead=True)
    replica.now += 0.15
    replica.asking.ask(3)
    replica.now += 0.01
    replica.asking.granted()
    assert replica.asking._shortest == pytest.approx(0.16)


def test_nearby_no_ends_are_kept(monkeypatch):
    replica = Replica(monkeypatch, "")
    replica.asking.ended()
    assert replica.asking._ends == []
