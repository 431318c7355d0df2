"""The real controller against workers that say what the test says, message by message: no process, no socket,
no clock but heartbeats."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from helpers.emulated.stand import controller_of, small_config
from helpers.made import Made, stored
from helpers.runs import assert_clean
from laminar_hpc.config.check import check
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.beginning import Begun
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.data import Message, Partial, ReplicaLoad, VersionSpan
from laminar_hpc.line.messages.membership import Failure, Hello, Ping
from laminar_hpc.line.messages.publication import NewWeightId
from laminar_hpc.line.messages.rollouts import (
    Generated,
    Grant,
    Increment,
    RequestWork,
    Scored,
    ScoreOrder,
    WeightsOpened,
)
from laminar_hpc.line.messages.training import Batch, Restored, StepDone, TakeBatch
from laminar_hpc.line.messages.wire import AnyMessage, decode, encode
from laminar_hpc.policies.metrics import batch_metrics
from laminar_hpc.rollout.partial_response import columns, tokens_of
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rundir import Start


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


M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class State:
    """What the controller holds, as far as tests look: the one place that knows in which of its parts."""

    ready_groups: int
    unscored: set[int]  # trajectories whose response waits for its score
    known: int  # trajectories of which the pool has tokens
    generating: dict[int, int]  # replica -> its trajectories
    rooms: list[int]  # replicas that take what others leave
    refused: int  # reports
    discarded: int  # tokens
    evaluations: list[str]  # those that are due
    trainer_step: int
    trainers: bool  # there are some
    trainer_done: bool
    finished: bool
    failure: str


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
        begun = Begun(check(config), Start(restored_step, None), Unlocked(), 0)
        self.controller = controller_of(config, begun, self.hub, 1, "apart", say)
        if trainer:
            self.trainer("", Restored(restored_step))
        self.relay(0, machine)

    def trainer(self, life: str, restored: Restored) -> None:
        self.hear("trainer", 0, Hello("trainer", 0, life, os.getpid(), "apart"), restored, life=life)

    def trainer_again(self, life: str) -> None:
        """One that has outlived the last controller."""
        self.hear("trainer", 0, Hello("trainer", 0, life, os.getpid(), "apart", rejoins=True), life=life)

    def relay(self, index: int, machine: str, life: str = "", place: str = "") -> None:
        hello = Hello("relay", index, life, os.getpid(), machine, place=place)
        self.hear("relay", index, hello, life=life)

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
        return self.newest

    def relay_holds(self, relay: int, step: int) -> None:
        """The newest weights, which are those of this step."""
        self.hear("relay", relay, RelayHas(self.newest, step, 1, 0.1, 0.0))

    def rollout(
        self, index: int, machine: str = "one", life: str = "", phase: str = "unverified", place: str = ""
    ) -> None:
        hello = Hello("rollout", index, life, os.getpid(), machine, place=place)
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

    def ends_clean(self) -> None:
        """And its records are audited."""
        self.closes()
        (self.run_dir / "config.yaml").write_text(dump_config(self.controller.config))
        assert_clean(self.run_dir)

    def again(self, trainer: bool = True) -> "Script":
        """The next controller over the same store."""
        self.closes()
        return Script(self.controller.config, trainer=trainer)

    def dies(self, index: int, life: str = "") -> None:
        self.hear("rollout", index, Failure("its engine died"), life=life)

    def granted(self, index: int, life: str = "") -> Grant | None:
        """The newest grant that it was sent and that the test has not seen yet."""
        sent = self.hub.left.setdefault(f"rollout:{index}:{life}", [])
        grants = [message for message in sent if isinstance(message, Grant)]
        sent.clear()
        assert len(grants) <= 1
        return grants[0] if grants else None

    def joins(self, index: int, weight_id: int = 0, machine: str = "one", life: str = "") -> Grant | None:
        """It comes, pulls these weights and asks for work; what it is granted."""
        self.rollout(index, machine, life)
        self.asks(index, weight_id, life=life)
        return self.granted(index, life)

    def working(self, replicas: int) -> list[Grant]:
        """So many have pulled the first weights, and each has a local batch of them."""
        self.publish(0, 0)
        grants = [self.joins(index) for index in range(replicas)]
        assert all(grants)
        return [grant for grant in grants if grant is not None]

    def sent(self, index: int, kind: type[M], life: str = "") -> list[M]:
        """Messages of a kind to a rollout that `granted` and `ordered` have not taken."""
        return [m for m in self.hub.left.get(f"rollout:{index}:{life}", []) if isinstance(m, kind)]

    def batches(self) -> list[Batch]:
        """All that the trainer was sent."""
        return [m for m in self.hub.left.get("trainer:0:", []) if isinstance(m, Batch)]

    def grants_nothing_new(self, on: bool = True) -> None:
        """From here on, as if admission had counted many groups more; or no longer."""
        self.controller.tracker.counted += 1000 if on else -1000

    @property
    def run_dir(self) -> Path:
        return Path(self.controller.config.run_dir)

    @property
    def newest(self) -> int:
        """The newest weight id."""
        return max(self.controller.weights.steps)

    def newest_batch(self, index: int) -> int | None:
        """The id of the last local batch of a rollout."""
        return self.controller.replicas.at(index).newest_batch

    def known(self, trajectory_id: int, attempt: int) -> Partial | None:
        """What the controller would let another replica go on from."""
        return self.controller.pool.get(trajectory_id, attempt)

    def owner(self, trajectory_id: int) -> tuple[int | None, int]:
        """(replica or None, attempt)."""
        return self.controller.tracker.groups.owner(trajectory_id)

    def scoring(self, index: int) -> Sequence[int]:
        """The trajectories that a rollout scores."""
        return self.controller.tracker.groups.holders.scoring(index)

    def open_of(self, group_id: int) -> Sequence[int]:
        """The trajectories of a group that nobody has."""
        return self.controller.tracker.groups.holders.open_of(group_id)

    def finished(self) -> list[Whole]:
        """The stored trajectories of all groups that are finished."""
        groups = [group.group_id for group in self.controller.tracker.groups.values() if group.finished]
        return wholes(self.run_dir, self.controller.store.rows.batch(groups))

    def states(self, table: str = "trajectories") -> dict[int, str]:
        """Of a table's rows in the store, by id."""
        return dict(self.controller.store._db.execute(f"SELECT id, state FROM {table}"))

    def state(self) -> State:
        c, tracker = self.controller, self.controller.tracker
        return State(
            ready_groups=tracker.ready_groups,
            unscored=set(tracker.owners.unscored),
            known=len(c.pool),
            generating=dict(tracker.groups.holders.generating_counts()),
            rooms=[room.replica for room in c.failover.rooms()],
            refused=tracker.counts.reports_refused,
            discarded=tracker.counts.tokens_discarded,
            evaluations=[each.key for each in c.evaluations.queue] if c.evaluations else [],
            trainer_step=c.state.trainer_step,
            trainers=bool(c.state.trainer_generation),
            trainer_done=c.state.trainer_done,
            finished=c.state.finished,
            failure=c.state.failure,
        )


def scripted(
    folder: Path,
    replicas: int = 2,
    steps: int = 8,
    prompts: int = 4,
    samples: int = 2,
    say: Callable[[str], None] = lambda _: None,
    **pipeline: object,
) -> Script:
    """A small run of so many groups a step, whose trainer and relay are there."""
    config = small_config(folder, replicas, steps, prompts, samples, **pipeline)
    config.emulation.time_scale = 1.0  # no engine is emulated here
    return Script(config, say=say)


def samples_of(grant: Grant) -> dict[int, int]:
    """Trajectory -> attempt."""
    return {sample.trajectory_id: sample.attempt for group in grant.groups for sample in group.samples}
