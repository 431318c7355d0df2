"""How far each worker's stream was taken stands in the transaction that holds its messages' effects."""

import pytest
from script import Script
from stand import small_config

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.store import Store
from laminar_hpc.messages.membership import Failure
from laminar_hpc.messages.publication import NewWeightId


def test_a_turn_that_fails_has_received_nothing(tmp_path):
    """docs/architecture.md#delivered-once: what a failed turn had taken is neither stored nor counted as
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
    store.close()
    again = Store(store.path.parent)
    assert again.received() == {"trainer:0:": 1} and again.next_ids()[0] == 1
    again.close()
