"""The real controller against workers that say what the test says, message by message: no process, no socket,
no clock but heartbeats."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from laminar_hpc.config.check import check
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller import run as controller_run
from laminar_hpc.controller.beginning import Begun
from laminar_hpc.controller.rundir import Start
from laminar_hpc.messages.chain import RelayHas
from laminar_hpc.messages.data import Message, Partial, ReplicaLoad, VersionSpan
from laminar_hpc.messages.membership import Failure, Hello, Ping
from laminar_hpc.messages.publication import NewWeightId
from laminar_hpc.messages.rollouts import (
    Generated,
    Grant,
    Increment,
    RequestWork,
    Scored,
    ScoreOrder,
    WeightsOpened,
)
from laminar_hpc.messages.training import Batch, Restored, StepDone, TakeBatch
from laminar_hpc.messages.wire import AnyMessage, decode, encode
from laminar_hpc.policies.metrics import batch_metrics
from laminar_hpc.rollout.partial_response import columns, tokens_of
from made import Made, stored


class Unlocked:
    """In the place of the run's lock: one script follows the other over one run directory."""

    is_sure = True

    def assure(self) -> None: ...


class Hub:
    """In the place of the sockets; messages are encoded on their way, as there."""

    def __init__(self) -> None:
        self.address = SimpleNamespace(run_id="script")
        self.arrived: list[tuple[str, AnyMessage]] = []
        self.left: dict[str, list[AnyMessage]] = {}

    def announce(self, store_id: str, received: dict[str, int]) -> None: ...
    def received(self) -> dict[str, int]:
        return {}

    def committed(self) -> None: ...
    def end(self, identity: str) -> None: ...

    def poll(self, seconds: float) -> list[tuple[str, AnyMessage]]:
        self.heard_until = time.monotonic()
        arrived, self.arrived = self.arrived, []
        return [(identity, decode(encode(message))) for identity, message in arrived]

    def send(self, identity: str, message: Message) -> None:
        self.left.setdefault(identity, []).append(decode(encode(message)))


class Script:
    """Trainer 0, relay 0 on `machine`, and rollouts as the test brings them in."""

    def __init__(
        self,
        config: RunConfig,
        machine: str = "one",
        restored_step: int | None = None,
        trainer: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`trainer`: it comes and starts at `restored_step`."""
        self.hub = Hub()
        os.makedirs(config.run_dir, exist_ok=True)
        Path(config.run_dir, "config.yaml").write_text(dump_config(config))
        begun = Begun(check(config), Start(restored_step, None), Unlocked(), 0)
        self.controller = controller_run.build(config, begun, self.hub, 1, "apart", say)
        if trainer:
            self.trainer("", Restored(restored_step))
        self.relay(0, machine)

    def trainer(self, life: str, restored: Restored) -> None:
        self.hear("trainer", 0, Hello("trainer", 0, life, os.getpid(), "apart"), restored, life=life)

    def trainer_again(self, life: str) -> None:
        """One that has outlived the last controller."""
        self.hear("trainer", 0, Hello("trainer", 0, life, os.getpid(), "apart", rejoins=True), life=life)

    def relay(self, index: int, machine: str, life: str = "") -> None:
        self.hear("relay", index, Hello("relay", index, life, os.getpid(), machine), life=life)

    def hear(self, role: str, index: int, *messages: Message, life: str = "") -> None:
        """Says them, each in a turn of its own."""
        for message in messages:
            self.hub.arrived.append((f"{role}:{index}:{life}", message))
            self.controller.turn()

    def publish(self, step: int, *relays: int, life: str = "") -> int:
        """New weights of the trainer, which these relays then hold; returns their id."""
        self.hear("trainer", 0, NewWeightId(step), life=life)
        for relay in relays:
            self.relay_holds(relay, step)
        return max(self.controller.weights.steps)

    def relay_holds(self, relay: int, step: int) -> None:
        """The newest weights, which are those of this step."""
        self.hear("relay", relay, RelayHas(max(self.controller.weights.steps), step, 1, 0.1, 0.0))

    def rollout(self, index: int, machine: str = "one", life: str = "", phase: str = "unverified") -> None:
        hello = Hello("rollout", index, life, os.getpid(), machine)
        self.hear("rollout", index, hello, Ping(ReplicaLoad(phase, None, 0, 0)), life=life)

    def asks(self, index: int, weight_id: int, newest_batch: int | None = None, life: str = "") -> None:
        """It has pulled these weights and wants work."""
        step = self.controller.weights.steps[weight_id]
        opened = WeightsOpened(weight_id, step, 0.1, {}, [], 0.0)
        self.hear("rollout", index, opened, RequestWork(weight_id, newest_batch), life=life)

    def works(self, index: int, grant: Grant, tokens: int, life: str = "") -> None:
        """It generates so many tokens more of all of a grant, and says so."""
        for sample in (sample for group in grant.groups for sample in group.samples):
            start = grant.parts.get(sample.trajectory_id, Partial()).count
            new = [(sample.trajectory_id + place) % 50 for place in range(start, start + tokens)]
            told = columns(new, [-1.0] * tokens)
            spans = [VersionSpan(grant.weight_id, start, start + tokens)]
            more = Increment(sample.trajectory_id, sample.attempt, start, *told, spans, 1.0)
            self.hear("rollout", index, more, life=life)
        load = ReplicaLoad(
            "draining", grant.weight_id, len(samples_of(grant)), 0, kv_capacity=10_000, kv_tokens=9_999
        )
        self.hear("rollout", index, Ping(load), life=life)

    def ends(
        self,
        index: int,
        grant: Grant,
        tokens: int,
        life: str = "",
        scores: bool = True,
        right: Callable[[int], bool] = lambda trajectory_id: trajectory_id % 2 == 1,
    ) -> None:
        """It generates the rest of a grant, so many tokens each, and with `scores` scores it: those that
        are `right` get 1, all others 0."""
        for group in grant.groups:
            for sample in group.samples:
                part = grant.parts.get(sample.trajectory_id, Partial())
                whole = tokens_of(part).tolist() + [
                    (sample.trajectory_id + place) % 50 for place in range(part.count, part.count + tokens)
                ]
                response = Made(
                    sample.trajectory_id,
                    group.group_id,
                    group.prompt_tokens,
                    whole,
                    [-1.0] * len(whole),
                    attempt=sample.attempt,
                    replica=index,
                    weight_id=grant.weight_id,
                    weight_step=grant.weight_step,
                    moves=part.moves,
                )
                trajectory = stored(Path(self.controller.config.run_dir), response)
                self.hear("rollout", index, Generated(trajectory), life=life)
                if scores:
                    reward = float(right(sample.trajectory_id))
                    self.scores(index, sample.trajectory_id, sample.attempt, life, reward)

    def scores(
        self, index: int, trajectory_id: int, attempt: int, life: str = "", reward: float = 1.0
    ) -> None:
        self.hear("rollout", index, Scored(trajectory_id, attempt, reward, {}, "", 3.0), life=life)

    def ordered(self, index: int, life: str = "") -> list[ScoreOrder]:
        """The responses that it was told to score and that the test has not seen yet."""
        sent = self.hub.left.setdefault(f"rollout:{index}:{life}", [])
        orders = [message for message in sent if isinstance(message, ScoreOrder)]
        sent[:] = [message for message in sent if not isinstance(message, ScoreOrder)]
        return orders

    def trains(self, step: int) -> None:
        """The trainer takes the batch of `step`, which must be there, and says that it is done."""
        self.hear("trainer", 0, TakeBatch(step))
        (batch,) = [m for m in self.hub.left["trainer:0:"] if isinstance(m, Batch) and m.step == step]
        times = {"wait_seconds": 0.1, "train_seconds": 0.1}
        records = [t for group in batch.groups for t in group.trajectories]
        self.hear("trainer", 0, StepDone(step, batch_metrics(records, 0, step) | times))

    def closes(self) -> None:
        """As a controller that ends in order."""
        for part in (self.controller.store, self.controller.metrics, self.controller.trace):
            part.close()

    def dies(self, index: int, life: str = "") -> None:
        self.hear("rollout", index, Failure("its engine died"), life=life)

    def granted(self, index: int, life: str = "") -> Grant | None:
        """The newest grant that it was sent and that the test has not seen yet."""
        sent = self.hub.left.setdefault(f"rollout:{index}:{life}", [])
        grants = [message for message in sent if isinstance(message, Grant)]
        sent.clear()
        assert len(grants) <= 1
        return grants[0] if grants else None

    @property
    def discarded(self) -> int:
        return self.controller.tracker.counts.tokens_discarded


def samples_of(grant: Grant) -> dict[int, int]:
    """Trajectory -> attempt."""
    return {sample.trajectory_id: sample.attempt for group in grant.groups for sample in group.samples}
