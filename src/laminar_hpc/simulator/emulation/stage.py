"""Stand-ins for trainer and relay around real rollouts and a real controller: they speak the same messages
and train nothing.

The relay writes model.path's own weights into its slots, under each new id; the trainer takes batches, lets
emulated time pass for them, and publishes: it hands each id over to the relay in its own process, where a run
has a link. No torch.
"""

import os
import queue
import threading
import time
import uuid
from pathlib import Path
from typing import TypeVar

import numpy as np

from laminar_hpc.config.adapter_places import slots_of
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.chain import EpochProposed, RelayHas
from laminar_hpc.line.messages.data import TOKEN_BYTES, Message, Trajectory
from laminar_hpc.line.messages.membership import Hello, Ping, Stop, Welcome
from laminar_hpc.line.messages.parking import HandOn, Keep, Park, Unpark
from laminar_hpc.line.messages.publication import NewWeightId, Published, WeightId
from laminar_hpc.line.messages.training import (
    Batch,
    Continue,
    Leave,
    NotYet,
    Restored,
    StepDone,
    TakeBatch,
    TrainerDone,
)
from laminar_hpc.machine.processes import machine_name
from laminar_hpc.policies.metrics import batch_metrics, reward_means
from laminar_hpc.simulator.emulated.weights import published
from laminar_hpc.weights.adapters import side_files
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.relay.parking import ParkingLot
from laminar_hpc.weights.slots import SlotWriter

_WAIT = 600.0
A = TypeVar("A", bound=Message)


def join(config: RunConfig, role: str) -> Channel:
    """Joins the run as number 0 of its role."""
    hello = Hello(role, 0, uuid.uuid4().hex[:8], os.getpid(), machine_name(config.relay.shm_dir))
    return Channel(
        Path(config.run_dir),
        hello,
        config.cluster.join_timeout_seconds,
        config.cluster.heartbeat_timeout_seconds,
    )


def relay(config: RunConfig, handed: "queue.SimpleQueue[WeightId]") -> None:
    """Writes slots until the controller says Stop."""
    channel = join(config, "relay")
    tensors, data = published(config)
    name, model, side = channel.welcome.slots_name, Path(config.model.path), side_files(config)
    writer = SlotWriter(config.relay.shm_dir, name, slots_of(config), model, side)
    lot = ParkingLot(config, channel.send)
    try:
        while True:
            channel.wait(Stop, timeout=0.0)  # raises when it is there
            while (message := channel.wait(Welcome, Park, Keep, HandOn, Unpark, timeout=0.0)) is not None:
                if isinstance(message, Welcome):
                    lot.forget()
                else:
                    lot.arrived(message)
            try:
                given = handed.get(timeout=0.1)
            except queue.Empty:
                continue
            began = time.time()
            manifest: Manifest = layout(
                [(n, s, config.model.dtype) for n, s in tensors], given.weight_id, given.step
            )
            writer.begin(manifest)[:] = np.frombuffer(data, dtype=np.uint8)
            writer.commit(manifest)
            now = time.time()
            channel.send(RelayHas(given.weight_id, given.step, manifest.data_bytes, now - began, now))
    except StopReceived:
        channel.close()
    finally:
        lot.close()
        writer.close()


def trainer(config: RunConfig, seconds_per_token: float, handed: "queue.SimpleQueue[WeightId]") -> None:
    """Trains all steps; each token of a batch takes `seconds_per_token` emulated seconds."""
    channel = join(config, "trainer")
    channel.send(Restored(None))
    channel.request(Ping(), EpochProposed, timeout=_WAIT, what="the first epoch")
    train(config, channel, 0, seconds_per_token, handed)


def train(
    config: RunConfig,
    channel: Channel,
    step: int,
    seconds_per_token: float,
    handed: "queue.SimpleQueue[WeightId]",
) -> None:
    """Trains from step `step` to the end of the run."""
    try:
        _publish(channel, step, handed)
        while step < config.steps:
            asked, waited = time.time(), 0.0
            trajectories, prompt_tokens = list[Trajectory](), 0
            stream = config.pipeline.consumption == "stream"
            for minibatch in range(config.algorithm.minibatches_per_step if stream else 1):
                begun = time.time()
                channel.send(TakeBatch(step, minibatch))
                batch = _answer(channel, Batch)
                if batch is None:
                    break
                waited += time.time() - begun
                new = [t for group in batch.groups for t in group.trajectories]
                prompts = sum(len(g.prompt_tokens) // TOKEN_BYTES * len(g.trajectories) for g in batch.groups)
                tokens = prompts + sum(t.length for t in new)
                time.sleep(tokens * seconds_per_token / config.emulation.time_scale)
                trajectories, prompt_tokens = trajectories + new, prompt_tokens + prompts
            if not trajectories:
                break
            trained = time.time()
            metrics = batch_metrics(trajectories, prompt_tokens, step)
            metrics |= reward_means(trajectories, config.reward.functions)
            step += 1
            _publish(channel, step, handed)
            channel.send(
                StepDone(
                    step - 1, {**metrics, "wait_seconds": waited, "train_seconds": trained - asked - waited}
                )
            )
            if _answer(channel, Continue) is None:
                break
        channel.send(TrainerDone(step))
        while True:
            channel.wait(Stop, timeout=1.0)
    except StopReceived:
        channel.close()


def _answer(channel: Channel, wanted: type[A]) -> A | None:
    """The controller's answer; None when the run is to end here."""
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        heard = channel.wait(wanted, Leave, NotYet, timeout=1.0)
        if isinstance(heard, Leave):
            return None
        if isinstance(heard, wanted):
            return heard
    raise TimeoutError(f"no {wanted.__name__} from the controller within {_WAIT:g} s")


def _publish(channel: Channel, step: int, handed: "queue.SimpleQueue[WeightId]") -> None:
    began = time.time()
    given = channel.request(NewWeightId(step), WeightId, timeout=_WAIT, what="a weight id")
    assert isinstance(given, WeightId)
    handed.put(given)
    now = time.time()
    channel.send(Published(given.weight_id, step, 0.0, 0.0, now - began, 0, [], now))


def run(config: RunConfig, seconds_per_token: float) -> None:
    """Runs both stand-ins, each in a thread, until the run is over."""
    handed: queue.SimpleQueue[WeightId] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=relay, args=(config, handed)),
        threading.Thread(target=trainer, args=(config, seconds_per_token, handed)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
