"""`laminar train` with rollout.replicas=MIN:MAX: which places of the machine replicas get."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from laminar_hpc.launch.one_machine import ReplicaPlaces
from laminar_hpc.line.agent_line import RankOrders


class Part:
    """In the place of the rollouts' part: its groups run until a test says how they have ended."""

    processes = 3

    def __init__(self) -> None:
        self.started: list[int] = []
        self.groups: list[Any] = []

    def start(self, orders: RankOrders, places: Sequence[int], advice: str) -> list[Any]:
        self.started += places
        self.groups.append(SimpleNamespace(code=None, is_told=False, role="rollout"))
        return self.groups[-1:]


def begun() -> tuple[Part, ReplicaPlaces, list[Any]]:
    part = Part()
    controller = SimpleNamespace(life=SimpleNamespace(to_start=0), code=None, is_told=False)
    groups: list[Any] = [controller]
    places = ReplicaPlaces(part, RankOrders(), groups, controller)  # type: ignore[arg-type]
    places.start(1)
    return part, places, groups


def test_each_replica_has_a_place_of_its_own():
    """The first that is free; one that has ended frees its own, and no more are started than there are
    places."""
    part, places, groups = begun()
    groups[0].life.to_start = 1
    places.look()
    places.look()
    assert part.started == [0, 1]
    part.groups[0].code = 0
    groups[0].life.to_start = 9
    places.look()
    assert part.started == [0, 1, 0, 2] and len(groups) == 1 + 3


def test_a_controller_that_starts_again_counts_anew():
    part, places, groups = begun()
    groups[0].life.to_start = 1
    places.look()
    groups[0].life = SimpleNamespace(to_start=1)
    places.look()
    assert part.started == [0, 1, 2]


def test_a_replica_that_dies_is_no_failure_of_the_run():
    """Its group is forgotten, whose exit code would be the run's; one that was refused stays, and nothing is
    started in a run that was told to end."""
    part, places, groups = begun()
    groups[0].life.to_start = 1
    places.look()
    part.groups[0].code, part.groups[1].code = 1, 2
    places.look()
    assert groups[1:] == [part.groups[1]]
    groups[0].is_told = True
    groups[0].life.to_start = 2
    places.look()
    assert part.started == [0, 1]
