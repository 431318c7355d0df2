"""How far each worker's stream was taken stands in the transaction that holds its messages' effects."""

from pathlib import Path

import pytest

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.membership import Failure, Stop
from laminar_hpc.line.messages.publication import NewWeightId, WeightId
from laminar_hpc.line.messages.training import Checkpointed
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.locks.run_lock import LockLost
from laminar_hpc.store.store import Store


def test_a_turn_that_fails_has_received_nothing(tmp_path):
    """docs/promises.md#delivered-once: what a failed turn had taken is neither stored nor counted as
    received, so that it is taken by the next controller."""
    script = Script(small_config(tmp_path))
    hub, store = script.hub, script.controller.store
    hub.received = lambda: {"trainer:0:": 1}
    script.hear("trainer", 0, NewWeightId(0))
    assert store.received() == {"trainer:0:": 1} and store.next_ids()[0] == 1
    hub.received = lambda: {"trainer:0:": 3}
    trainer = "trainer:0:"
    hub.arrived += [(trainer, NewWeightId(1)), (trainer, Failure("enough", permanent=True))]
    with pytest.raises(LaminarError, match="a worker has failed"):
        script.controller.turn()
    script.controller.tell_all_to_leave("it has failed")
    script.controller.send_all()
    said = [type(message) for message in hub.left[trainer]]
    assert said.count(WeightId) == 1, "nor is anything of it sent"
    assert isinstance(hub.left["relay:0:"][-1], Stop)
    store.close()
    again = Store(store.path.parent)
    assert again.received() == {"trainer:0:": 1} and again.next_ids()[0] == 1
    again.close()


def test_who_was_replaced_while_it_listened_takes_nothing(tmp_path):
    """docs/promises.md#one-controller: what had arrived at a controller that stood still is its
    successor's: nothing of it stands in the run's metrics."""
    script = Script(small_config(tmp_path))
    controller, begun = script.controller, [False]

    def assure() -> None:
        if begun[0]:
            raise LockLost("another controller has the run")

    controller.store.assure = assure
    script.hear("trainer", 0, Checkpointed(1, "one", 0.1, ""))
    poll = script.hub.poll

    def stands_still(seconds: float) -> list:
        begun[0] = True
        return poll(seconds)

    script.hub.poll = stands_still
    script.hub.arrived.append(("trainer:0:", Checkpointed(2, "two", 0.1, "")))
    with pytest.raises(LockLost):
        controller.turn()
    metrics = Path(controller.config.run_dir) / "metrics.jsonl"
    assert [record["step"] for record in jsonl.read(metrics, "checkpoint")] == [1]
