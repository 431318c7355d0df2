"""Publishing behind the trainer's back, to real relays: what arrives is what the parameters were, whatever
the trainer does after the fence; a relay that dies costs an id, never the trainer."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.paths import EXAMPLES
from helpers.trainer import tiny
from helpers.trainer.publishing import (
    Controller,
    Line,
    Publisher,
    linked,
    scratch,
    slot_bytes,
    spoil,
    start,
    whole,
)
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.chain import LinkDown, RelayHas, StoreOpened
from laminar_hpc.line.messages.publication import NewWeightId, Published
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.weights.relay import run as relay

LARGE = {
    "vocab_size": 3000,
    "hidden_size": 128,
    "intermediate_size": 256,
}  # 2.6 MB: three chunks of 1 MB, cut inside the embedding


@pytest.fixture(scope="module")
def policy(world: None, tmp_path_factory: pytest.TempPathFactory) -> MegatronPolicy:
    return MegatronPolicy(
        tiny.make_config(
            tiny.make_model(tmp_path_factory.mktemp("large"), 3, **LARGE), relay__chunk_megabytes=1
        )
    )


@pytest.fixture(params=["overlapped"])
def running(
    policy: MegatronPolicy, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Controller, Publisher]]:
    policy.config.relay.publish, policy.config.relay.publish_timeout_seconds = request.param, 20.0
    controller, publisher = start(policy.config, tmp_path, policy)
    yield controller, publisher
    controller.stop()


@pytest.mark.parametrize("running", ["overlapped", "blocking"], indirect=True)
def test_what_arrives_is_what_was_published(
    policy: MegatronPolicy, running: tuple[Controller, Publisher]
) -> None:
    """Parameters that change right behind the fence, over and over: every id at the first and at the last
    relay of a chain has the bytes of its step, with the right sums (else a relay would have failed). What
    left the trainer is those bytes, to 1%."""
    controller, publisher = running
    controller.link(controller.add_relay(), controller.add_relay())
    linked(publisher)
    for step in range(4):
        publisher.publish(step)
        expected = whole(policy)
        publisher.fence()
        spoil(policy)
        controller.wait_for(RelayHas, 2 * step + 2)
        for index in (0, 1):
            slot = controller.newest(index)
            assert slot.step == step and slot_bytes(slot) == expected
    published = controller.wait_for(Published, 4)
    assert [p.weight_id for p in published] == [0, 1, 2, 3] and len(published[0].probe_logprobs) == 124
    assert all(len(expected) <= p.bytes <= 1.01 * len(expected) for p in published)
    publisher.close()


def test_a_relay_that_takes_nothing_costs_one_id(
    policy: MegatronPolicy, running: tuple[Controller, Publisher]
) -> None:
    """The fence waits for the time limit at most and the trainer goes on; the next weights go to the relay of
    the next epoch."""
    controller, publisher = running
    publisher._seconds = 1.0  # links have 20 s, so it is the fence that gives up
    controller.deaf = True
    controller.link(controller.add_relay())
    linked(publisher)
    publisher.publish(0)
    controller.wait_for(NewWeightId)
    started = time.monotonic()
    publisher.fence()
    assert time.monotonic() - started < 3.0
    (down,) = controller.wait_for(LinkDown)
    assert "relay 0" in down.text
    spoil(policy)
    controller.deaf = False
    controller.link(controller.add_relay())
    linked(publisher)
    publisher.publish(1)
    controller.wait_for(RelayHas)
    assert controller.newest(1).step == 1 and slot_bytes(controller.newest(1)) == whole(policy)
    assert [p.step for p in controller.wait_for(Published)] == [1]


def test_without_a_link_the_trainer_does_not_wait(
    policy: MegatronPolicy, running: tuple[Controller, Publisher]
) -> None:
    """The fence returns at once, and no weight id is asked for."""
    controller, publisher = running
    publisher.publish(0)
    started = time.monotonic()
    publisher.fence()
    assert time.monotonic() - started < 1.0 and not controller.all(NewWeightId)


def test_an_error_of_the_publisher_is_heard_at_once(
    policy: MegatronPolicy, running: tuple[Controller, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: memory that cannot be had in the publisher's thread ends the run now, while the trainer waits
    for a batch, not at the next fence."""
    controller, publisher = running
    failure = MemoryError("no memory for a bucket")

    def turn() -> None:
        raise failure

    monkeypatch.setattr(publisher._worker, "turn", turn)
    publisher._thread.join(30)
    assert controller.trainer.failures == [failure]
    with pytest.raises(MemoryError):
        publisher.publish(0)


def test_slots_that_are_removed_end_the_relay(
    policy: MegatronPolicy, running: tuple[Controller, Publisher]
) -> None:
    """Promise (docs/resuming.md): weight slots that a logout takes out of /dev/shm are missed within seconds,
    in one line with the cure, not when the next pull has waited for minutes."""
    controller, publisher = running
    errors = list[str]()

    def serve(line: Line) -> None:
        with pytest.raises(LaminarError) as raised:
            relay.run(controller.context("relay", 0, line))
        errors.append(str(raised.value))

    line = controller.relays[0] = Line("relay0", controller)
    thread = threading.Thread(target=serve, args=(line,), daemon=True)
    thread.start()
    controller.link(0)
    linked(publisher)
    publisher.publish(0)
    slots = controller.wait_for_step(0, 0).directory.parent
    shutil.rmtree(slots)
    thread.join(10)
    assert len(errors) == 1 and errors[0].startswith(f"{slots} was removed while the run goes on")


def test_without_a_controller_the_weights_are_given_up(
    policy: MegatronPolicy, running: tuple[Controller, Publisher]
) -> None:
    """The controller dies before it has answered a request for an id: the fence gives up after its time, and
    the trainer goes on; the next weights go out under the id of the controller that comes. One that comes
    before that is asked again, and no weights are lost."""
    controller, publisher = running
    controller.link(controller.add_relay())
    linked(publisher)
    publisher._seconds, controller.away = 1.0, True
    publisher.publish(0)
    controller.wait_for(NewWeightId)
    started = time.monotonic()
    publisher.fence()
    assert 0.9 < time.monotonic() - started < 1.8
    publisher.publish(1)
    controller.wait_for(NewWeightId, 2)
    controller.away = False
    publisher.fence()
    controller.wait_for_step(0, 1)
    assert [p.step for p in controller.wait_for(Published)] == [1]
    controller.away = True
    publisher.publish(2)
    threading.Timer(2.5, setattr, (controller, "away", False)).start()
    publisher.close()
    controller.wait_for_step(0, 2)  # the end waits as long as a controller may come


def test_a_new_epoch_gets_the_live_weights_again(
    policy: MegatronPolicy, running: tuple[Controller, Publisher]
) -> None:
    """Until the weights change, a relay that comes later, or after the death of the one that had them, gets
    them under a new id."""
    controller, publisher = running
    publisher.publish(7)
    for epoch in range(3):
        controller.link(controller.add_relay())
        controller.wait_for(RelayHas, epoch + 1)
        assert controller.newest(epoch).step == 7 and slot_bytes(controller.newest(epoch)) == whole(policy)
    controller.wait_for(Published, 3)
    publisher.fence()
    controller.link(controller.add_relay())
    linked(publisher)
    publisher.publish(8)
    published = [(p.weight_id, p.step) for p in controller.wait_for(Published, 4)]
    assert published == [(0, 7), (1, 7), (2, 7), (3, 8)], "weights that may have changed are not sent again"


@pytest.fixture(scope="module")
def served_as_bfloat16(world: None, tmp_path_factory: pytest.TempPathFactory) -> MegatronPolicy:
    model = tiny.make_model(tmp_path_factory.mktemp("deltas"), 3, **LARGE)
    return MegatronPolicy(
        tiny.make_config(
            model,
            model__dtype="bfloat16",
            relay__chunk_megabytes=1,
            relay__delta="auto",
            relay__publish_timeout_seconds=20.0,
        )
    )


def test_changes_arrive_as_full_copies_would(served_as_bfloat16: MegatronPolicy, tmp_path: Path) -> None:
    """Few changed elements in chunks that end inside tensors, down a chain of two, at once behind the fence;
    and what is told of them."""
    policy = served_as_bfloat16
    controller, publisher = start(policy.config, tmp_path, policy)
    controller.link(controller.add_relay(), controller.add_relay())
    linked(publisher)
    for step in range(4):
        publisher.publish(step)
        expected = whole(policy)
        publisher.fence()
        scratch(policy, step)
        controller.wait_for(RelayHas, 2 * step + 2)
        for index in (0, 1):
            assert controller.newest(index).step == step and slot_bytes(controller.newest(index)) == expected
    first, *others = controller.wait_for(Published, 4)
    assert first.changed is None and first.bytes == first.full_bytes > len(expected)
    count = len(list(policy.gpt.parameters()))
    for p in others:
        assert 0 < p.changed <= count * 2 / len(expected) and p.full_bytes == first.full_bytes
        assert (
            p.bytes - (first.bytes - len(expected)) < 1000
        )  # a few hundred bytes of changes instead of 1.3 MB
    publisher.close()
    controller.stop()


def test_changes_to_weights_that_are_not_there_are_refused(
    served_as_bfloat16: MegatronPolicy, tmp_path: Path
) -> None:
    """One line names both ids, and the next link brings the weights in full."""
    policy = served_as_bfloat16
    controller, publisher = start(policy.config, tmp_path, policy)
    controller.link(controller.add_relay())
    linked(publisher)
    publisher.publish(0)
    controller.wait_for(RelayHas)
    publisher.fence()
    (lane,) = publisher.lanes.mine
    before = lane.link
    controller.link(controller.add_relay())
    controller.wait_for(StoreOpened, 2)
    while lane.link is None or lane.link is before:
        time.sleep(0.01)
    lane.link.weight_id = lane.image.weight_id  # which this relay has never seen
    publisher.publish(1)
    downs = controller.wait_for(LinkDown, 2)
    assert any("weight id 1 came as changes to weight id 0, which is not here" in down.text for down in downs)
    controller.link(1)
    controller.wait_for(RelayHas, 2)
    assert controller.newest(1).step == 1 and slot_bytes(controller.newest(1)) == whole(policy)
    published = controller.wait_for(Published, 2)[1]
    assert published.bytes == published.full_bytes and published.changed is None, (
        "the image was of two publications"
    )
    publisher.close()
    controller.stop()


STEPS = 200


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rate", [1e-6, 5e-5])
def test_200_steps_of_training_against_full_copies(rate: float, world: None, tmp_path: Path) -> None:
    """The shipped model in bfloat16, real updates by the learner: each id at the last relay of a chain of two
    is, bit for bit, the copy that was taken of the weights when they were published; and no publication is
    larger than a full one but by its chunks' heads."""
    base = EXAMPLES / "arithmetic" / "base"
    settings = {
        "model__dtype": "bfloat16",
        "relay__delta": "auto",
        "relay__full_every": 50,
        "optimizer__lr": rate,
        "steps": STEPS,
    }
    policy = MegatronPolicy(tiny.make_config(base, **settings, optimizer__eps=1e-8))
    learner = Learner(policy.config, policy)
    controller, publisher = start(policy.config, tmp_path, policy)
    controller.link(controller.add_relay(), controller.add_relay())
    linked(publisher)
    for step in range(STEPS + 1):
        publisher.publish(step)
        expected = whole(policy)
        controller.wait_for(RelayHas, 2 * step + 2)
        assert controller.newest(1).step == step and slot_bytes(controller.newest(1)) == expected
        batch = tiny.make_batch(seed=step)
        for trajectory in batch:
            for tokens in (trajectory.prompt_tokens, trajectory.response_tokens):
                tokens[:] = [token % policy.shape.vocab for token in tokens]
        learner.train(tiny.step_batch(batch), step, publisher.fence)
    publisher.close()
    controller.stop()
    told = controller.all(Published)
    assert len(told) == STEPS + 1 and all(p.bytes <= p.full_bytes + 64 for p in told)
    changed = [p.changed for p in told[1:]]
    in_full = [p.weight_id for p in told if p.bytes == p.full_bytes]
    over_full = sum(p.bytes for p in told) / sum(p.full_bytes for p in told)
    print(
        f"learning rate {rate}: changed {sum(changed) / STEPS:.4f} per step, bytes over full {over_full:.4f}"
    )
    assert all(0 < fraction < 1 for fraction in changed) and in_full == list(range(0, STEPS + 1, 50))


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_trainer_ranks(split: str, ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's thread brings its slices beside its training; the fence holds on both."""
    settings = {f"trainer__{split}_parallel": 2, "relay__chunk_megabytes": 1}
    model = tiny.make_model(tmp_path / "model", 3, **LARGE)
    assert ranks.run(2, "cases:published", model=str(model), settings=settings, folder=str(tmp_path)) == [
        4,
        4,
    ]
