"""A relay that starts anew offers nothing until it is sent weights again: a replica whose engine holds none
waits for them."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.emulated.stand import small_config
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.factory import engine_factory
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Message, Partial, PromptGroup, Sample
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.line.messages.rollouts import Grant, NotLoaded, RequestWork, WeightsOpened
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout import weight_loader
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.weight_loader import WeightLoader
from laminar_hpc.rollout.worker import RolloutWorker
from laminar_hpc.simulator.emulated.weights import weights_file
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.slots import SlotReader, SlotWriter


def relay(config: RunConfig) -> SlotWriter:
    """One that has just started."""
    return SlotWriter(config.relay.shm_dir, "run", 3, Path(config.model.path))


def publish(config: RunConfig, writer: SlotWriter, weight_id: int) -> None:
    tensors, data = weights_file(Path(config.model.path))
    manifest = layout([(name, shape, config.model.dtype) for name, shape in tensors], weight_id, weight_id)
    writer.begin(manifest)[:] = np.frombuffer(data, dtype=np.uint8)
    writer.commit(manifest)


async def test_a_replica_that_lost_its_weights_waits_for_the_relay(tmp_path: Path) -> None:
    """It goes back to older weights for trajectories of a dead replica, and its relay starts anew before it
    has: it says so, and asks for work again on the first weights that come."""
    config, said = small_config(tmp_path), list[Message]()
    config.relay.shm_dir = str(tmp_path)
    channel = SimpleNamespace(send=said.append)
    welcome, trace = Welcome("run"), Trace(tmp_path, "rollout", 0)
    context = RoleContext(config, "rollout", 0, "here", tmp_path, channel, welcome, trace)
    worker = RolloutWorker(context, engine_factory(config, 0, tmp_path), RewardPool(config.reward))
    writer = relay(config)
    for weight_id in (5, 7):
        publish(config, writer, weight_id)
    await worker.engines.start(Path(config.model.path), None)
    group = PromptGroup(1, [1, 2, 3], "", {}, [Sample(7, 1)])
    worker._granted(Grant(2, 5, 5, [group], 1.0, 100, parts={7: Partial()}))
    writer = relay(config)
    await worker._turn()
    assert [type(message) for message in said] == [NotLoaded]
    turn = asyncio.create_task(worker._turn())
    done, _ = await asyncio.wait([turn], timeout=0.2)
    assert not done
    publish(config, writer, 8)
    async with asyncio.timeout(30):
        while not isinstance(said[-1], RequestWork):
            await asyncio.sleep(0.01)
    assert isinstance(said[-2], WeightsOpened) and said[-1] == RequestWork(8, 2)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await worker.engines.current.stop()
    writer.close()


async def test_a_pull_waits_for_the_relay_also_after_an_engine_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load takes longer than a slot is waited for, and fails; the relay has started anew meanwhile. The
    time of the load does not count."""
    config = small_config(tmp_path)
    config.relay.shm_dir = str(tmp_path)
    engines, now = EngineLives(engine_factory(config, 0, tmp_path), lambda: 0), [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: now[0])
    monkeypatch.setattr(weight_loader, "time", clock)
    first = engines.current
    loader = WeightLoader(SlotReader(str(tmp_path), "run"), [], Trace(tmp_path, "rollout", 0), engines)
    writers = [relay(config)]
    publish(config, writers[0], 5)

    async def fails(*_: object) -> None:
        now[0] += 10 * weight_loader.LEASE_SECONDS
        writers.append(relay(config))
        raise LaminarError("it did not answer")

    await engines.start(Path(config.model.path), None)
    monkeypatch.setattr(first, "load_weights", fails)
    pull = asyncio.create_task(loader.pull())
    while engines.current is first and not pull.done():
        await asyncio.sleep(0.01)
    publish(config, writers[1], 6)
    assert (await pull).weight_id == 6
    await engines.current.stop()
    writers[1].close()
