"""Publishing from devices that work behind the host's back (tests/fake_device.py), to real relays: what
arrives is what was published, whatever the trainer does as soon as it may."""

import time
from pathlib import Path

import pytest
import torch

from helpers.links.fake_device import FakeDevice, used
from helpers.trainer import tiny
from helpers.trainer.device_cases import Rows
from helpers.trainer.publishing import linked, slot_bytes, start
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.trainer.megatron.building import transformer_config
from laminar_hpc.weights.hf import read_shape


def test_weights_that_are_released_have_left(ranks: Ranks, tmp_path: Path) -> None:
    """A rank's slices are read by its device later than they are sent. Else the sums, which are taken of what
    came, would be those of torn weights, and nobody would ever know. Of three ranks the second sends no lane.
    None is in a group of the world's own backend beside the training: two kernels of NCCL that each wait for
    another rank would wait for ever where two ranks run them in different orders."""
    told = ranks.run(3, "device_cases:changed_as_soon_as_released", seconds=90, folder=str(tmp_path))
    assert told[0]["senders"] == [0, 2] and all(each["same"] for each in told)
    assert all(each["backends"] and set(each["backends"]) == {"gloo"} for each in told)


@pytest.mark.parametrize(
    ("transport", "delta", "crosses"),
    [("auto", "off", "host"), ("host", "auto", "host"), ("nccl", "off", "nccl"), ("nccl", "auto", "nccl")],
)
def test_what_arrives_is_what_was_published(
    transport: str, delta: str, crosses: str, world: None, tmp_path: Path
) -> None:
    """From one device to another by each way, in several chunks, over and over:
    through the memory of the devices, or through host memory that relays of the machine map. What changes are
    taken against is in host memory that the device knows, and no larger than the weights."""
    config = RunConfig()
    config.model.path = str(tmp_path)
    config.relay.transport, config.relay.delta, config.relay.chunk_megabytes = transport, delta, 1
    config.relay.publish_timeout_seconds = 20.0
    trainer, relay = FakeDevice("GPU-trainer"), FakeDevice("GPU-relay")
    with used(trainer, relays=relay):
        model = Rows(1, 80)  # 2.6 MB
        controller, publisher = start(config, tmp_path, model)
        controller.link(controller.add_relay())
        linked(publisher)
        for step in range(3):
            publisher.publish(step)
            expected = model.now
            publisher.fence()
            for view in model.held[step::3]:
                view += 1
            controller.wait_for(RelayHas, step + 1)
            slot = controller.newest(0)
            assert slot.step == step and slot_bytes(slot) == expected
        (lane,) = publisher.lanes.mine
        assert lane.link.transport == crosses
        assert (lane.nbytes in trainer.registered) == (delta == "auto")
        assert bool(trainer.pairs) == bool(relay.pairs) == (crosses == "nccl")
        publisher.close()
        controller.stop()
        assert lane.bytes_changed[0] == (delta == "auto")  # counted behind the send


def test_copied_weights_leave_while_they_change(world: None, tmp_path: Path) -> None:
    """With relay.publish=copied the next update waits for nothing: what it changes while a publication still
    waits for its id does not reach the relay. The publication after it waits for the copy to be read."""
    config, device = RunConfig(), FakeDevice()
    config.model.path, config.relay.publish = str(tmp_path), "copied"
    config.relay.publish_timeout_seconds, config.relay.chunk_megabytes = 20.0, 1
    with used(device):
        model = Rows(1, 80)
        controller, publisher = start(config, tmp_path, model)
        controller.link(controller.add_relay())
        linked(publisher)
        for step in range(2):
            controller.away = True
            publisher.publish(step)
            expected, began = model.now, time.monotonic()
            publisher.fence()
            assert time.monotonic() - began < 5
            for view in model.held:
                view += 1
            controller.away = False
            controller.wait_for(RelayHas, step + 1)
            slot = controller.newest(0)
            assert slot.step == step and slot_bytes(slot) == expected
        publisher.close()
        controller.stop()


def test_a_device_that_stands_still_is_named(world: None, tmp_path: Path) -> None:
    """The wait for the weights to be read is bounded, and says who waited for what."""
    config, device = RunConfig(), FakeDevice()
    config.model.path, config.relay.publish_timeout_seconds = str(tmp_path), 0.1
    with used(device):
        controller, publisher = start(config, tmp_path, Rows(1, 1))
        device.default.free.clear()
        with pytest.raises(LaminarError, match="trainer 0 waited for its GPU: the reading of"):
            publisher.lanes.settle()
        device.default.free.set()
        publisher.close()
        controller.stop()


def test_stages_do_not_wait_for_a_publication(tied_model: Path) -> None:
    """Megatron's default is to synchronise the whole device after each exchange between pipeline stages."""
    config = tiny.make_config(tied_model, trainer__pipeline_parallel=2)
    assert not transformer_config(read_shape(str(tied_model)), config, torch.float32).batch_p2p_sync
