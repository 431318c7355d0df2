"""docs/promises.md#come-and-go, in whole emulated runs: real workers that the controller numbers join
late and leave for good."""

import pytest

from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.loop import Controller
from laminar_hpc.line.endings import Terminated
from laminar_hpc.report import rundata


class Tides:
    """After every turn of the controller: a second replica joins after the first step, a third after the
    second; then the first is told to end, and the second's engine dies for good."""

    def __init__(self) -> None:
        self.stand: Stand | None = None
        self.crews: list[int] = []

    def __call__(self, controller: Controller) -> None:
        stand, step = self.stand, controller.state.trainer_step
        assert stand is not None
        serving = [replica.worker for replica in stand.newcomers if replica.worker is not None]
        self.crews.append(len(controller.active_replicas.replicas()))
        if len(stand.newcomers) < min(3, step + 1):
            stand.join()
        elif len(self.crews) > 1 and len(stand.newcomers) == 3 and step >= 3:
            replicas = controller.active_replicas.replicas()
            if replicas >= {0, 1, 2}:
                serving[0].context.channel.interrupt(Terminated())
            elif replicas == {1, 2} and step >= 4:
                serving[1].engines.current.die()


@pytest.mark.parametrize(
    "pipeline",
    [
        {"repack": "kv", "max_staleness": 2},
        pytest.param({"refresh": "barrier", "max_staleness": 1}, marks=pytest.mark.slow),
    ],
    ids=["drained", "barrier"],
)
def test_replicas_come_and_go(tmp_path, pipeline):
    """Of two that are configured one is awaited; three are there at once, and one is left at the end: each
    trajectory is generated and trained once, the audit is clean, and nobody waits for who has left."""
    tides = Tides()
    config = small_config(tmp_path, replicas=2, steps=6, **pipeline)
    config.rollout.replicas_min, config.rollout.increment_tokens = 1, 25
    config.emulation.time_scale = 40.0
    tides.stand = Stand(config, each_turn=tides, lasting=0)
    tides.stand.run(90)
    assert_every_one_ended_once(config)
    assert [replica.index for replica in tides.stand.newcomers] == [0, 1, 2]
    assert max(tides.crews) == 3 and tides.crews[-1] == 1
    records = rundata.load(tmp_path / "run").records
    assert [record["replica"] for record in records["leaving"]] == [0]
    assert {record["replica"] for record in records["pull"]} == {0, 1, 2}
