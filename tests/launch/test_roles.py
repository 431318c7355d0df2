"""Roles follow from the layout alone; a world of the wrong size is refused in one line with the right one."""

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.placement import place
from laminar_hpc.machine.roles import RoleOfRank, assign_roles


def names(*layout):
    return [f"{r.role}{r.index}" for r in assign_roles(*layout)]


def test_layouts():
    """Roles follow from the rank, and every world has its controller."""
    assert names(1, 1, 1, 4) == ["trainer0", "controller0", "relay0", "rollout0"]
    assert names(2, 2, 1, 6) == ["trainer0", "trainer1", "controller0", "relay0", "rollout0", "rollout1"]
    assert names(1, 1, 2, 2) == ["trainer0", "controller0", "relay0", "rollout0"]
    assert names(1, 0, 1, 2) == ["trainer0", "controller0"]


def test_each_machine_with_rollouts_has_its_relay():
    """One relay per machine with rollouts, before its rollouts."""
    roles = assign_roles(1, 4, 2, 4)
    assert [r.role for r in roles[4:]].count("relay") == 1
    assert [r.role for r in roles[:4]] == ["trainer", "controller", "relay", "rollout"]


def test_each_machine_with_rollouts_has_a_relay_for_every_lane():
    """Relay number i is lane i modulo the lanes of its machine."""
    assert names(1, 1, 1, 5, 2) == ["trainer0", "controller0", "relay0", "relay1", "rollout0"]
    on_two = names(2, 5, 2, 6, 2)
    assert on_two[3:6] == ["relay0", "relay1", "rollout0"]
    assert on_two[6:] == ["relay2", "relay3", "rollout1", "rollout2", "rollout3", "rollout4"]


@pytest.mark.parametrize(
    "layout",
    [(1, 1, 1, 4, 2), (1, 2, 1, 5, 2), (1, 1, 1, 3), (2, 1, 1, 4), (1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 1, 5)],
)
def test_wrong_worlds_are_refused_with_the_right_size(layout):
    """A world of the wrong size is refused with the number of ranks to start."""
    with pytest.raises(LaminarError, match=r"does not fit .* start \d+ ranks"):
        assign_roles(*layout)


def test_rollouts_started_apart_are_counted_on_their_machine(monkeypatch):
    """For their GPUs; their numbers in the run are given by the controller, so first_index is refused with
    what to write instead. A plain process is one of one."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    config = RunConfig(role="rollout")
    mine, here, _ = place(config)
    assert mine == here[1] and here == [RoleOfRank("rollout", index) for index in range(3)]
    config.first_index = 1
    with pytest.raises(
        LaminarError, match="first_index=1: leave it out for rollouts; the controller numbers"
    ):
        place(config)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert place(RunConfig(role="rollout"))[1] == [RoleOfRank("rollout", 0)]
    with pytest.raises(LaminarError, match="RANK is not set"):
        place(RunConfig(role="relay"))
