"""Emulated rollouts, trainer and relay in one process, each with an encrypted line of its own to a controller
that does not know the difference: bench/control_loop.py measures that under their load.

A rollout that has work says `rate` / rollouts responses a second, each with its score; it pulls newer weights
when it has drained. The trainer takes each batch, trains in no time and publishes; the relay has all at once.
No payload files are written, as the controller reads none. Prints one JSON object: see `Crowd.figures`.

    python bench/control_crowd.py RUN_DIR ROLLOUTS RATE TOKENS SECONDS
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from laminar_hpc.line.address import ControllerAddress, read_address
from laminar_hpc.line.dealer import PING_SECONDS, connect
from laminar_hpc.line.delivery import Header, Receiver, Sender, decode_header, encode_header
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.data import (
    Message,
    PromptGroup,
    ReplicaLoad,
    ResponsePlace,
    Sample,
    Trajectory,
)
from laminar_hpc.line.messages.membership import Hello, Ping, Pong, Welcome
from laminar_hpc.line.messages.publication import NewWeightId, WeightId
from laminar_hpc.line.messages.rollouts import (
    Generated,
    Grant,
    RequestWork,
    Scored,
    WeightsAvailable,
    WeightsOpened,
)
from laminar_hpc.line.messages.training import Batch, Continue, Restored, StepDone, TakeBatch
from laminar_hpc.line.messages.wire import decode, encode
from laminar_hpc.line.spool import Spool
from laminar_hpc.machine.processes import die_with_parent

PER_MACHINE = 8  # rollouts, beside a relay
BEGIN_SECONDS = 120.0  # until the load is measured


def record(
    group: PromptGroup, sample: Sample, replica: int, weight_id: int, weight_step: int, tokens: int
) -> Trajectory:
    """Of a response that is in no file."""
    who = (sample.trajectory_id, group.group_id, sample.attempt, replica, weight_id, weight_step)
    place = ResponsePlace(f"rollout{replica}_00000000.0000", 9 * tokens * sample.trajectory_id, 9 * tokens)
    return Trajectory(*who, tokens, tokens, 1, "stop", 1.0, 2.0, digest="0" * 32, place=place)


def step_metrics() -> dict[str, float]:
    """Of a step, as far as the controller asks for them."""
    means = ("response_length_mean", "response_length_max", "reward_mean", "accuracy_mean")
    stale = ("staleness_generation_max", "staleness_training_mean", "staleness_training_max")
    counts = ("trajectories", "prompt_tokens", "response_tokens", "reward_error_count", "truncated_fraction")
    return dict.fromkeys((*means, *stale, *counts, "wait_seconds", "train_seconds"), 1.0)


class Line:
    """One worker's line, as line/worker_line.py has it, without its thread."""

    def __init__(
        self, context: zmq.Context, address: ControllerAddress, role: str, index: int, machine: int
    ) -> None:
        hello = Hello(role, index, "a", os.getpid(), f"machine{machine}")
        self.index, self.socket = index, connect(context, hello.identity.encode(), address)
        self.sender, self.receiver, self.session = Sender(Spool()), Receiver(), ""
        self.pinged_at: deque[float] = deque()
        self.waits: list[float] = []  # from each ping to its answer, seconds
        self.next_ping = time.monotonic() + PING_SECONDS * (index % 97) / 97
        self.load: ReplicaLoad | None = None
        self._put(0, encode(hello))

    def _put(self, number: int, frame: bytes) -> None:
        sent = max(number, self.sender.sent)
        header = encode_header(Header(self.session, number, sent, self.receiver.received))
        self.socket.send_multipart([header, frame])

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.sender.push(encode(message))
        self._transmit()

    def _transmit(self) -> None:
        while self.session and (due := self.sender.peek()) is not None:
            number, frame = due
            self.sender.advance()
            self._put(number, frame)

    def ping(self, now: float) -> None:
        if self.session and now >= self.next_ping:
            self.next_ping = now + PING_SECONDS
            self.pinged_at.append(now)
            self._put(0, encode(Ping(self.load)))

    def hear(self, hears: Callable[[Message], None]) -> None:
        """All that has come."""
        answer = False
        while True:
            try:
                head, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            header = decode_header(head)
            self.sender.acknowledged(header.ack)
            if header.again:
                self.sender.rewind()
            answer |= header.seq > 0
            if not frame or (header.seq and not self.receiver.take(header.seq)):
                continue
            message = decode(frame)
            if isinstance(message, Pong):
                self.waits.append(time.monotonic() - self.pinged_at.popleft())
                continue
            if isinstance(message, Welcome):
                self.session = header.session
            hears(message)
        if answer:
            self._put(0, b"")
        self._transmit()


class Rollout:
    def __init__(self, line: Line, seconds_each: float, tokens: int) -> None:
        self.line, self.seconds_each = line, seconds_each
        self.newest: WeightsAvailable | None = None
        self.serves: WeightsAvailable | None = None
        self.batch: int | None = None
        self.work: deque[tuple[PromptGroup, Sample]] = deque()
        self.next, self.said, self.others = 0.0, 0, 0  # messages but for responses and scores
        self.tokens = tokens

    def hears(self, message: Message) -> None:
        if isinstance(message, WeightsAvailable):
            self.newest = message
            if not self.work:
                self.asks()
        elif isinstance(message, Grant):
            self.batch, self.next = message.batch_id, max(self.next, time.monotonic() - self.seconds_each)
            self.work.extend((group, sample) for group in message.groups for sample in group.samples)

    def asks(self) -> None:
        if self.newest is None:
            return
        if self.serves is not self.newest:
            self.serves = self.newest
            weights = (self.serves.weight_id, self.serves.weight_step)
            self.line.say(WeightsOpened(*weights, 0.1, {}, [], time.time()))
            self.others += 1
        self.line.load = ReplicaLoad("draining", self.serves.weight_id, 16, 0, 16, 0, 16_000, 10**6)
        self.line.say(RequestWork(self.serves.weight_id, self.batch))
        self.others += 1

    def _weights(self) -> tuple[int, int]:
        assert self.serves is not None
        return self.serves.weight_id, self.serves.weight_step

    def works(self, now: float) -> None:
        while self.work and now >= self.next:
            self.next += self.seconds_each
            group, sample = self.work.popleft()
            done = Scored(sample.trajectory_id, sample.attempt, float(self.said % 2), {}, "", time.time())
            made = record(group, sample, self.line.index, *self._weights(), self.tokens)
            self.line.say(Generated(made), done)
            self.said += 1
            if not self.work:
                self.asks()


class Crowd:
    """Trainer, relay and rollouts, until `seconds` have passed since the first step."""

    def __init__(self, run_dir: Path, rollouts: int, rate: float, tokens: int) -> None:
        self.begin_by = time.monotonic() + BEGIN_SECONDS
        while (address := read_address(run_dir)) is None:
            self.check_time(f"a controller of {run_dir}")
            time.sleep(0.05)
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, rollouts + 100)
        self.trainer = Line(context, address, "trainer", 0, -1)
        machines = range(-(-rollouts // PER_MACHINE))
        self.relays = [Line(context, address, "relay", machine, machine) for machine in machines]
        lines = [Line(context, address, "rollout", i, i // PER_MACHINE) for i in range(rollouts)]
        self.rollouts = [Rollout(line, rollouts / rate, tokens) for line in lines]
        self.lines = [self.trainer, *self.relays, *(rollout.line for rollout in self.rollouts)]
        self.poller, self.step, self.steps = zmq.Poller(), 0, list[float]()
        for line in self.lines:
            self.poller.register(line.socket, zmq.POLLIN)
        self.hears = {rollout.line.socket: rollout.hears for rollout in self.rollouts}
        self.hears |= {line.socket: self.relay_hears for line in self.relays}
        self.hears[self.trainer.socket] = self.trainer_hears
        self.of = {line.socket: line for line in self.lines}

    def check_time(self, what: str) -> None:
        if time.monotonic() > self.begin_by:
            raise SystemExit(f"waited {BEGIN_SECONDS:.0f} s for {what}")

    def relay_hears(self, _: Message) -> None: ...

    def trainer_hears(self, message: Message) -> None:
        say = self.trainer.say
        if isinstance(message, Welcome):
            say(Restored(None), NewWeightId(0))
        elif isinstance(message, WeightId):
            for relay in self.relays:
                relay.say(RelayHas(message.weight_id, message.step, 1, 0.1, time.time()))
            if message.step == 0:
                say(TakeBatch(0))
        elif isinstance(message, Batch):
            self.step += 1
            self.steps.append(time.monotonic())
            say(NewWeightId(self.step), StepDone(self.step - 1, step_metrics()))
        elif isinstance(message, Continue):
            say(TakeBatch(self.step))

    def run(self, seconds: float) -> dict[str, float]:
        begun, said, waits = 0.0, 0, list[int]()
        while not begun or time.monotonic() < begun + seconds:
            for socket, _ in self.poller.poll(5):
                self.of[socket].hear(self.hears[socket])
            now = time.monotonic()
            for line in self.lines:
                line.ping(now)
            for rollout in self.rollouts:
                rollout.works(now)
            if not begun:
                self.check_time("the first two steps")
            if not begun and self.step >= 2:
                begun, said = now, self.said()
                waits = [len(line.waits) for line in self.lines]
        took = time.monotonic() - begun
        answered = sorted(
            wait for line, first in zip(self.lines, waits, strict=True) for wait in line.waits[first:]
        )
        return {
            "trajectories_per_second": (self.said() - said) / took,
            "decision_seconds_median": answered[len(answered) // 2],
            "decision_seconds_p99": answered[int(0.99 * len(answered))],
            "decision_seconds_max": answered[-1],
            "pings_answered": len(answered),
            "steps": self.step,
        }

    def said(self) -> int:
        """Responses that the controller has acknowledged, with their scores."""
        return sum(max(0, each.line.sender.acked - each.others) for each in self.rollouts) // 2


def main(run_dir: str, rollouts: str, rate: str, tokens: str, seconds: str) -> None:
    die_with_parent()
    crowd = Crowd(Path(run_dir), int(rollouts), float(rate), int(tokens))
    print(json.dumps(crowd.run(float(seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
