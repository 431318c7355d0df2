"""Any trainer layout through any number of lanes: each machine's slot has the canonical bytes, as many leave
the trainers, to 1%, and a lane that fails leaves no half slot."""

import time
from pathlib import Path

import pytest

from helpers.trainer import tiny
from helpers.trainer.publishing import linked, scratch, slot_bytes, spoil, start, whole
from helpers.trainer.ranks import Ranks
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.chain import LinkDown, RelayHas
from laminar_hpc.line.messages.publication import LaneSenders, NewWeightId, Published
from laminar_hpc.trainer.megatron.policy import MegatronPolicy

LARGE = {"vocab_size": 4000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}  # 4.4 MB
# tensor, pipeline, data and context parallel
TRAINERS = {
    "tp2": (2, 1, 1, 1),
    "pp2": (1, 2, 1, 1),
    "dp2": (1, 1, 2, 1),
    "cp2": (1, 1, 1, 2),
    "tp2-pp2": (2, 2, 1, 1),
    "tp2-dp2": (2, 1, 2, 1),
    "tp2-cp2": (2, 1, 1, 2),
}


def check(ranks: Ranks, layout: str, lanes: int, folder: Path, **more: object) -> dict:
    tensor, pipeline, data, context = TRAINERS[layout]
    model = tiny.make_model(folder / "model", 3, **LARGE)
    settings = {
        "trainer__tensor_parallel": tensor,
        "trainer__pipeline_parallel": pipeline,
        "trainer__data_parallel": data,
        "trainer__context_parallel": context,
        "relay__chunk_megabytes": 1,
        "relay__lanes": lanes,
        "relay__publish_timeout_seconds": 30.0,
        **more,
    }
    told = ranks.run(
        tensor * pipeline * data * context,
        "cases:published_in_lanes",
        model=str(model),
        settings=settings,
        folder=str(folder),
    )[0]
    assert all(told["size"] <= left <= 1.01 * told["size"] for left in told["full"]), told
    assert sum(told["lanes"]) == told["size"] and max(told["lanes"]) <= 1.25 * told["size"] / lanes
    print(layout, lanes, told)
    return told


def test_two_lanes_of_two_tensor_parallel_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank sends one lane and gathers about half of it; the slots of both machines are committed when
    both lanes are there."""
    told = check(ranks, "tp2", 2, tmp_path)
    assert told["senders"] == [0, 1] and sum(told["gathered"]) < 0.51 * told["size"]
    assert told["bytes"] == told["full"] and told["changed"] == [None, None]


def test_changes_from_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """An update of the size of the last bit changes a part of the weights; each rank compares its lane, and
    rank 0 tells of both."""
    told = check(ranks, "tp2", 2, tmp_path, relay__delta="auto", optimizer__lr=1e-9)
    (none, changed), (first, second) = told["changed"], told["bytes"]
    assert told["senders"] == [0, 1] and none is None and 0 < changed < 0.9 and first == told["full"][0]
    assert second - (first - told["size"]) < (changed + 0.04) * told["size"]


def test_a_lane_that_fails_holds_the_slot_back(world: None, tmp_path: Path) -> None:
    """Both lanes by one rank. Without a relay in one of them nothing goes out and the trainer does not wait;
    when one dies in between, the slot keeps what it had, and its successor, which joins the living relay's
    slots, completes the next sending, under a new id."""
    model = tiny.make_model(tmp_path / "model", 3, **LARGE)
    policy = MegatronPolicy(
        tiny.make_config(model, relay__lanes=2, relay__chunk_megabytes=1, relay__publish_timeout_seconds=20.0)
    )
    controller, publisher = start(policy.config, tmp_path, policy)
    assert [told.ranks for told in controller.wait_for(LaneSenders)] == [[0, 0]]
    controller.link(controller.add_relay(0))
    publisher.publish(0)
    publisher.fence()
    assert not controller.all(NewWeightId)
    controller.link(controller.add_relay(1))
    linked(publisher)
    publisher.publish(1)
    assert slot_bytes(controller.wait_for_step(0, 1)) == whole(policy)
    assert sorted(has.complete for has in controller.wait_for(RelayHas, 2)) == [False, True]
    controller.relays[1].deliver(StopReceived("it dies"))
    controller.threads[1].join(10)
    publisher.fence()
    spoil(policy)
    publisher.publish(2)
    (down,) = controller.wait_for(LinkDown)
    assert down.epoch % 2 == 1 and controller.newest(0).step == 1
    controller.link(controller.add_relay(1))
    slot = controller.wait_for_step(0, 2)
    assert slot_bytes(slot) == whole(policy) and slot.weight_id > max(
        has.weight_id for has in controller.all(RelayHas)[:2]
    )
    assert [p.step for p in controller.wait_for(Published, 2)] == [1, 2]
    publisher.close()
    controller.stop()


def test_changes_in_two_lanes(world: None, tmp_path: Path) -> None:
    """On two machines, each lane down its own chain; a lane whose relay is a new one gets a full copy, the
    other one changes."""
    model = tiny.make_model(tmp_path / "model", 3, **LARGE)
    settings = {
        "relay__lanes": 2,
        "relay__delta": "auto",
        "relay__chunk_megabytes": 1,
        "relay__publish_timeout_seconds": 20.0,
    }
    policy = MegatronPolicy(tiny.make_config(model, model__dtype="bfloat16", **settings))
    controller, publisher = start(policy.config, tmp_path, policy)
    for index in range(4):
        controller.add_relay(index)
    controller.link(0, 2)
    controller.link(1, 3)
    linked(publisher)
    for step in range(4):
        if step == 3:
            before = publisher.lanes.mine[1].link
            controller.link(1, 3)
            while publisher.lanes.mine[1].link in (None, before):
                time.sleep(0.01)
        publisher.publish(step)
        expected = whole(policy)
        for machine in (0, 1):
            assert slot_bytes(controller.wait_for_step(machine, step)) == expected
        publisher.fence()
        scratch(policy, step)
    first, *others, last = controller.wait_for(Published, 4)
    assert first.changed is None and first.bytes == first.full_bytes > len(expected)
    for told in others:
        assert (
            0 < told.changed < 0.001
            and told.bytes - (first.bytes - len(expected)) < 5000
            and told.full_bytes == first.full_bytes
        )
    assert 0.45 < (last.bytes - others[0].bytes) / len(expected) < 0.55 and 0 < last.changed < 0.001
    publisher.close()
    controller.stop()


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("layout", TRAINERS)
def test_any_trainer_layout_to_any_engine(layout: str, lanes: int, ranks: Ranks, tmp_path: Path) -> None:
    """Trainer layouts x lanes x engines of 1 and 2 ranks. Several lanes are spread over the ranks; what
    replicas hold is not gathered, and of pipeline stages only what a border in a stage leaves."""
    told = check(ranks, layout, lanes, tmp_path)
    tensor, pipeline, data, context = TRAINERS[layout]
    assert told["senders"][0] == 0 and len(set(told["senders"])) >= min(lanes, 2)
    most = 0.7 if tensor > 1 and pipeline > 1 else 0.51 if tensor > 1 else 0.0 if data * context > 1 else 0.3
    assert sum(told["gathered"]) <= most * told["size"]
