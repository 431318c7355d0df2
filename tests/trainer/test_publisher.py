"""Publishing behind the trainer's back, to real relays: what arrives is what the parameters were, whatever the trainer does after the
fence; a relay that dies costs an id, never the trainer."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from publishing import Controller, Publisher, linked, slot_bytes, spoil, start, whole
from ranks import Ranks

from laminar_hpc import messages as m
from laminar_hpc.trainer.megatron import MegatronPolicy

LARGE = {"vocab_size": 3000, "hidden_size": 128, "intermediate_size": 256}  # 2.6 MB: three chunks of 1 MB, cut inside the embedding


@pytest.fixture(scope="module")
def policy(world: None, tmp_path_factory: pytest.TempPathFactory) -> MegatronPolicy:
    return MegatronPolicy(tiny.make_config(tiny.make_model(tmp_path_factory.mktemp("large"), 3, **LARGE), relay__chunk_megabytes=1))


@pytest.fixture(params=["overlapped"])
def running(policy: MegatronPolicy, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Controller, Publisher]]:
    policy.config.relay.publish, policy.config.relay.publish_timeout_seconds = request.param, 20.0
    controller, publisher = start(policy.config, tmp_path, policy)
    yield controller, publisher
    controller.stop()


@pytest.mark.parametrize("running", ["overlapped", "blocking"], indirect=True)
def test_what_arrives_is_what_was_published(policy: MegatronPolicy, running: tuple[Controller, Publisher]) -> None:
    """Parameters that change right behind the fence, over and over: every id at the first and at the last relay of a chain has the bytes
    of its step, with the right sums (else a relay would have failed). What left the trainer is those bytes, to 1%."""
    controller, publisher = running
    controller.link(controller.add_relay(), controller.add_relay())
    linked(publisher)
    for step in range(4):
        publisher.publish(step)
        expected = whole(policy)
        publisher.fence()
        spoil(policy)
        controller.wait_for(m.RelayHas, 2 * step + 2)
        for index in (0, 1):
            slot = controller.newest(index)
            assert slot.step == step and slot_bytes(slot) == expected
    published = controller.wait_for(m.Published, 4)
    assert [p.weight_id for p in published] == [0, 1, 2, 3] and len(published[0].probe_logprobs) == 124
    assert all(len(expected) <= p.bytes <= 1.01 * len(expected) for p in published)
    publisher.close()


def test_a_relay_that_takes_nothing_costs_one_id(policy: MegatronPolicy, running: tuple[Controller, Publisher]) -> None:
    """The fence waits for the time limit at most and the trainer goes on; the next weights go to the relay of the next epoch."""
    controller, publisher = running
    publisher._seconds = 1.0  # links have 20 s, so it is the fence that gives up
    controller.deaf = True
    controller.link(controller.add_relay())
    linked(publisher)
    publisher.publish(0)
    controller.wait_for(m.NewWeightId)
    started = time.monotonic()
    publisher.fence()
    assert time.monotonic() - started < 3.0
    (down,) = controller.wait_for(m.LinkDown)
    assert "relay 0" in down.text
    spoil(policy)
    controller.deaf = False
    controller.link(controller.add_relay())
    linked(publisher)
    publisher.publish(1)
    controller.wait_for(m.RelayHas)
    assert controller.newest(1).step == 1 and slot_bytes(controller.newest(1)) == whole(policy)
    assert [p.step for p in controller.wait_for(m.Published)] == [1]


def test_without_a_link_the_trainer_does_not_wait(policy: MegatronPolicy, running: tuple[Controller, Publisher]) -> None:
    controller, publisher = running
    publisher.publish(0)
    started = time.monotonic()
    publisher.fence()
    assert time.monotonic() - started < 1.0 and not controller.all(m.NewWeightId)


def test_a_new_epoch_gets_the_live_weights_again(policy: MegatronPolicy, running: tuple[Controller, Publisher]) -> None:
    """Until the weights change, a relay that comes later, or after the death of the one that had them, gets them under a new id."""
    controller, publisher = running
    publisher.publish(7)
    for epoch in range(3):
        controller.link(controller.add_relay())
        controller.wait_for(m.RelayHas, epoch + 1)
        assert controller.newest(epoch).step == 7 and slot_bytes(controller.newest(epoch)) == whole(policy)
    controller.wait_for(m.Published, 3)
    publisher.fence()
    controller.link(controller.add_relay())
    time.sleep(0.5)
    assert [p.weight_id for p in controller.all(m.Published)] == [0, 1, 2], "weights that may have changed are not sent again"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_trainer_ranks(split: str, ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's thread brings its slices beside its training; the fence holds on both."""
    settings = {f"trainer__{split}_parallel": 2, "relay__chunk_megabytes": 1}
    model = tiny.make_model(tmp_path / "model", 3, **LARGE)
    assert ranks.run(2, "cases:published", model=str(model), settings=settings, folder=str(tmp_path)) == [4, 4]
