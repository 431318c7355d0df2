"""Workers that outlive their controllers, as a test has them: real channels, and what each role says after a
Welcome. All are served in the test's thread, by `Workers.until`."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from helpers.made import trajectory
from laminar_hpc.line.address import read_address
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.chain import EpochProposed, RelayHas
from laminar_hpc.line.messages.data import Message, Partial, PromptGroup, ReplicaLoad, Sample, VersionSpan
from laminar_hpc.line.messages.membership import Hello, Ping, Welcome
from laminar_hpc.line.messages.moves import Import, Imported, MoveAbort, MoveCommit, Reserve, Reserved
from laminar_hpc.line.messages.publication import NewWeightId, Published, WeightId
from laminar_hpc.line.messages.rollouts import (
    Drop,
    Generated,
    Grant,
    Holds,
    Increment,
    RequestWork,
    Scored,
    ScoreOrder,
    WeightsAvailable,
    WeightsOpened,
)
from laminar_hpc.line.messages.training import Batch, Continue, Leave, NotYet, StepDone, TakeBatch
from laminar_hpc.machine.processes import machine_name
from laminar_hpc.rollout.partial_response import columns

SECONDS = 40.0


class Worker:
    def __init__(self, folder: Path, role: str, index: int, life: str = "a") -> None:
        machine = machine_name("/dev/shm")
        hello = Hello(role, index, life, os.getpid(), machine)
        self.folder, self.index, self.heard, self.has_left = folder, index, list[Message](), False
        self.channel = Channel(folder, hello, SECONDS, 20.0, SECONDS)

    def serve(self) -> bool:
        """Takes a message if there is one; leaves when it is told to."""
        try:
            message = None if self.has_left else self.channel.wait(Message, timeout=0)
        except StopReceived:
            self.has_left = True
            self.channel.close()
            return True
        if message is None:
            return False
        self.heard.append(message)
        self.hears(message)
        return True

    def hears(self, message: Message) -> None: ...

    def all(self, kind: type) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    def is_back(self) -> bool:
        """At the controller that there is."""
        address, welcomes = read_address(self.folder), self.all(Welcome)
        return address is not None and bool(welcomes) and welcomes[-1].run_id == address.run_id


class Relay(Worker):
    holds: RelayHas | None = None

    def hears(self, message: Message) -> None:
        if isinstance(message, Welcome) and self.holds:
            self.channel.send(self.holds)

    def takes(self, given: WeightId) -> None:
        self.holds = RelayHas(given.weight_id, given.step, 0, 0.0, 0.0)
        self.channel.send(RelayHas(given.weight_id, given.step, 9, 0.1, time.time()))


class Trainer(Worker):
    """What it asks is asked again by the channel."""

    requests = 0

    def publishes(self, step: int) -> WeightId:
        self.requests += 1
        number = self.requests
        given = self.channel.request(
            NewWeightId(step, number),
            WeightId,
            timeout=SECONDS,
            what="an id",
            fits=lambda m: m.request == number,
        )
        assert isinstance(given, WeightId)
        self.channel.send(Published(given.weight_id, step, 0.0, 0.0, 0.0, 9, [], time.time()))
        return given

    def takes(self, step: int) -> Batch:
        found = self.channel.request(
            TakeBatch(step), Batch, timeout=SECONDS, what="a batch", fits=lambda m: m.step == step
        )
        assert isinstance(found, Batch)
        return found

    def has_done(self, done: StepDone) -> Message:
        return self.channel.request(
            done,
            Continue,
            Leave,
            timeout=SECONDS,
            what="an answer",
            fits=lambda m: not isinstance(m, Continue) or m.step == done.step,
        )

    def serve(self) -> bool:
        return self.channel.wait(EpochProposed, NotYet, Welcome, timeout=0) is not None


class Rollout(Worker):
    """Generates and scores when the test says so."""

    def __init__(self, folder: Path, index: int, life: str = "a") -> None:
        super().__init__(folder, "rollout", index, life)
        self.served: tuple[int, int] | None = None
        self.newest_batch: int | None = None
        self.generating: dict[int, tuple[PromptGroup, Sample, Grant]] = {}
        self.partials: dict[int, Partial] = {}
        self.scoring: dict[int, Sample] = {}
        self.reserved: dict[str, Reserve] = {}
        self.imported: dict[str, Import] = {}
        self.dropped: list[Sample] = []

    def hears(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self.says_what_it_holds()
        elif isinstance(message, WeightsAvailable):
            self.pulls(message)
        elif isinstance(message, Grant):
            self.newest_batch = message.batch_id
            for group in message.groups:
                for sample in group.samples:
                    self.generating[sample.trajectory_id] = group, sample, message
        elif isinstance(message, Drop):
            self.dropped += message.samples
            for sample in message.samples:
                self.generating.pop(sample.trajectory_id, None)  # it may have ended meanwhile
        elif isinstance(message, Reserve):
            self.reserved[message.move_id] = message
            self.channel.send(Reserved(message.move_id, ""))
        elif isinstance(message, Import):
            self.imported[message.move_id] = message
            self.channel.send(Imported(message.move_id, 0))
        elif isinstance(message, MoveCommit):
            self._owns(self.reserved[message.move_id], self.imported.pop(message.move_id), message.attempt)
        elif isinstance(message, MoveAbort):
            self.imported.pop(message.move_id, None)

    def says_what_it_holds(self) -> None:
        samples = [sample for _, sample, _ in self.generating.values()]
        served = None if self.served is None else self.served[0]
        scoring, moves = list(self.scoring.values()), sorted(self.imported)
        self.channel.send(Holds(served, self.newest_batch, samples, scoring, moves))
        for move_id in self.imported:
            self.channel.send(Imported(move_id, 0))
        self.asks()

    def _owns(self, reserve: Reserve, came: Import, attempt: int) -> None:
        sample = Sample(reserve.trajectory_id, attempt)
        grant = Grant(0, reserve.weight_id, reserve.weight_step, [], 1.0, reserve.max_response_tokens)
        self.generating[reserve.trajectory_id] = reserve.group, sample, grant
        self.partials[reserve.trajectory_id] = came.partial

    def pulls(self, weights: WeightsAvailable) -> None:
        if self.generating or (self.served and self.served[0] >= weights.weight_id):
            return
        self.served = weights.weight_id, weights.weight_step
        self.channel.send(WeightsOpened(*self.served, 0.1, {}, [], time.time()))
        self.asks()

    def asks(self) -> None:
        if self.served and not self.generating:
            self.channel.send(RequestWork(self.served[0], self.newest_batch))

    def works(self, tokens: int) -> None:
        """Says that so many tokens of all that it generates are there, and that it drains."""
        for group, sample, grant in self.generating.values():
            told, spans = columns([7] * tokens, [-1.0] * tokens), [VersionSpan(grant.weight_id, 0, tokens)]
            more = Increment(sample.trajectory_id, sample.attempt, 0, *told, spans, 1.0)
            self.channel.send(more)
            assert group.samples
        self.drains()

    def drains(self) -> None:
        served = self.served[0] if self.served else None
        self.channel.load = ReplicaLoad(
            "draining", served, len(self.generating), 0, kv_capacity=10_000, kv_tokens=10
        )
        self.channel.send(Ping())

    def ends(self, count: int = 1_000) -> None:
        """The last tokens of so many of its trajectories."""
        for i in list(self.generating)[:count]:
            group, sample, grant = self.generating.pop(i)
            response = trajectory(group, sample, grant.weight_id, grant.weight_step, self.folder)
            response.replica = self.index
            self.channel.send(Generated(response))
            self.scoring[i] = sample
        self.asks()

    def scores(self) -> None:
        """All that wait for it."""
        for i, sample in self.scoring.items():
            self.channel.send(Scored(i, sample.attempt, float(i % 2), {}, "", time.time()))
        for order in self.all(ScoreOrder):
            self.channel.send(Scored(order.trajectory_id, order.attempt, 1.0, {}, "", time.time()))
        self.scoring.clear()


class Workers:
    def __init__(self, *workers: Worker) -> None:
        self.workers = list(workers)

    def until(self, condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
        """Serves all until it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not any([worker.serve() for worker in self.workers]):
                time.sleep(0.005)
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
