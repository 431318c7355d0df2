"""A publisher and real relays in one process: the relays run in threads, and a script stands in the place of
the controller."""

import threading
import time
from collections import deque
from pathlib import Path

import torch

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.chain import EpochProposed, JoinEpoch, StoreOpened
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.line.messages.publication import NewWeightId, WeightId
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.trainer.publishing.publisher import Publisher
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import reach_store
from laminar_hpc.weights.relay import run as relay
from laminar_hpc.weights.slots import SlotHandle, SlotReader


class Line:
    """In the place of a role's channel."""

    def __init__(self, name: str, controller: "Controller") -> None:
        self.name, self.inbox, self.arrived, self._controller = (
            name,
            deque(),
            threading.Condition(),
            controller,
        )
        self.failures: list[BaseException] = []  # of threads beside the role

    def when_failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def deliver(self, message: Message | Exception) -> None:
        with self.arrived:
            self.inbox.append(message)
            self.arrived.notify_all()

    def send(self, message: Message) -> None:
        self._controller.told(self.name, message)

    sessions = 0

    @property
    def detached(self) -> bool:
        return self._controller.away

    def wait(self, *wanted: type, timeout: float) -> Message | None:
        deadline = time.monotonic() + timeout
        with self.arrived:
            while True:
                for item in self.inbox:
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, wanted):
                        self.inbox.remove(item)
                        return item
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                self.arrived.wait(left)

    def pending(self, *wanted: type) -> bool:
        with self.arrived:
            return any(isinstance(item, (*wanted, Exception)) for item in self.inbox)

    def interrupt(self, error: Exception) -> None:
        self.deliver(error)

    def request(
        self, message: Message, *answers: type, timeout: float, what: str, fits, meanwhile
    ) -> Message:
        """Asks again at the controller that comes, as a Channel does after its Welcome."""
        self.send(message)
        was_away, deadline = self.detached, time.monotonic() + timeout
        while self.detached or time.monotonic() < deadline:
            answer = self.wait(*answers, timeout=0.05)
            if answer is not None and fits(answer):
                return answer
            if was_away and not self.detached:
                was_away = False
                self.send(message)
            meanwhile()
        raise AssertionError(what)


class Controller:
    """Numbers weight ids from 0, makes the links that `link` asks for, and notes everything."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.trainer, self.relays = Line("trainer", self), dict[int, Line]()
        self.heard: list[tuple[str, Message]] = []
        self.epoch, self.next_id, self.chain = 0, 0, []
        self.deaf = False  # links are made, but nobody receives
        self.away = False  # it has died before it answered
        self._receivers: dict[int, int] = {}  # of each epoch's link
        self._held: list[Link] = []
        self._changed = threading.Condition()
        self.threads: list[threading.Thread] = []

    def context(self, role: str, index: int, line: Line) -> RoleContext:
        machine = index // self.config.relay.lanes
        run = Welcome(f"machine{machine}-{self.folder.name}")
        return RoleContext(
            self.config, role, index, "here", self.folder, line, run, Trace(self.folder, role, index)
        )

    def add_relay(self, index: int | None = None) -> int:
        """A relay of its own thread, with slots of its own or, as one of several lanes, of its machine; it
        has no link yet."""
        index = len(self.relays) if index is None else index
        line = self.relays[index] = Line(f"relay{index}", self)
        thread = threading.Thread(target=relay.run, args=(self.context("relay", index, line),), daemon=True)
        self.threads.append(thread)
        thread.start()
        return index

    def link(self, *chain: int) -> None:
        """Links trainer and relays, all of one lane, in this order, each pair in an epoch of its own."""
        self.chain, lanes = list(chain), self.config.relay.lanes
        for place, line in enumerate([self.trainer, *(self.relays[index] for index in chain[:-1])]):
            self.epoch += lanes + (chain[0] - self.epoch) % lanes
            self._receivers[self.epoch] = chain[place]
            line.deliver(EpochProposed(self.epoch, self.chain[place:]))

    def told(self, name: str, message: Message) -> None:
        if isinstance(message, StoreOpened):
            join = JoinEpoch(message.epoch, message.host, message.port, name)
            if self.deaf:
                threading.Thread(target=self._hold, args=(join,), daemon=True).start()
            else:
                self.relays[self._receivers[message.epoch]].deliver(join)
        elif isinstance(message, NewWeightId) and not self.away:
            self.trainer.deliver(WeightId(self.next_id, message.step, len(self.chain), message.request))
            self.next_id += 1
        with self._changed:
            self.heard.append((name, message))
            self._changed.notify_all()

    def _hold(self, join: JoinEpoch) -> None:
        store = reach_store(join.host, join.port, 5.0)
        self._held.append(Link(store, join.epoch, 0, False, join.peer, "127.0.0.1", torch.device("cpu"), 5.0))

    def all(self, kind: type) -> list:
        return [message for _, message in self.heard if isinstance(message, kind)]

    def wait_for(self, kind: type, count: int = 1, seconds: float = 60) -> list:
        """The first `count` messages of a kind."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all(kind)) >= count, seconds), (kind, self.heard)
        return self.all(kind)[:count]

    def newest(self, machine: int) -> SlotHandle | None:
        return SlotReader(self.config.relay.shm_dir, f"machine{machine}-{self.folder.name}").newest()

    def wait_for_step(self, machine: int, step: int, seconds: float = 60) -> SlotHandle:
        """The newest slot of a machine, once it has the weights of this step."""
        until = time.monotonic() + seconds
        while (slot := self.newest(machine)) is None or slot.step < step:
            assert time.monotonic() < until, (machine, step, slot and slot.step)
            time.sleep(0.01)
        return slot

    def stop(self) -> None:
        for line in (self.trainer, *self.relays.values()):
            line.deliver(StopReceived("the test is over"))
        for thread in self.threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self.threads)


def start(config: RunConfig, folder: Path, policy: object, rank: int = 0) -> tuple[Controller, Publisher]:
    config.relay.shm_dir = str(folder)
    controller = Controller(config, folder)
    return controller, Publisher(controller.context("trainer", rank, controller.trainer), policy)


def linked(publisher: Publisher) -> None:
    """Waits until the trainer's link is there."""
    until = time.monotonic() + 20
    while not publisher.lanes.linked:
        assert time.monotonic() < until, "no link"
        time.sleep(0.01)


def whole(policy: object) -> bytes:
    """The canonical tensors' bytes, one after the other; collective."""
    return b"".join(
        t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for _, t in policy.canonical_tensors()
    )


def slot_bytes(handle: SlotHandle) -> bytes:
    content = (handle.directory / "model.safetensors").read_bytes()
    return content[len(content) - handle.manifest.data_bytes :]


def spoil(policy: object) -> None:
    """What an optimizer does."""
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter += 1


def scratch(policy: object, number: int) -> None:
    """Changes one element of every parameter."""
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.view(-1)[number] += 1
