"""A replica for tests: the real rollout worker in a thread, with a real engine, slots and reward workers. The
test plays the controller and the relay."""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil

from helpers.engines.pair import engine_config, fill_slot, make_model
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.factory import engine_factory
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.in_order import InOrder
from laminar_hpc.line.messages.data import Message, PromptGroup, Sample
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.line.messages.rollouts import (
    Grant,
    RequestWork,
    WeightsAvailable,
)
from laminar_hpc.line.messages.wire import decode, encode
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout import event_loop, worker
from laminar_hpc.weights.slots import SlotWriter

SCORER = """
import asyncio, os

async def score(*, prompt, response, row):
    while row["kind"] == "gated" and not os.path.exists("gate"):
        await asyncio.sleep(0.02)
    if row["kind"] == "broken":
        raise ValueError("no such problem")
    return {"reward": float(len(response)), "accuracy": 1.0, "prompt": float(prompt == row["prompt"])}
"""


class Controller:
    """The other end of the worker's channel: keeps what the worker sends, as bytes on the wire, and sends
    what the test says."""

    def __init__(self) -> None:
        self.heard: list[Message] = []  # all of it, in order
        self.received: queue.Queue[Message] = queue.Queue()
        self.requests: queue.Queue[RequestWork] = (
            queue.Queue()
        )  # they come before, among or after the scores of a batch
        self.callback: Callable | None = None
        self._order = InOrder(self._arrived, self.tell)
        self.batches = 0

    def subscribe(self, callback: Callable) -> None:
        self.callback = callback

    def send(self, message: Message) -> None:
        self._order.add(encode(message))

    def send_after(self, write: Future, message: Callable[..., Message]) -> None:
        self._order.add_after(write, lambda given: encode(message(given)))

    def _arrived(self, frame: bytes) -> None:
        message = decode(frame)
        self.heard.append(message)
        (self.requests if isinstance(message, RequestWork) else self.received).put(message)

    def tell(self, message: Message | Exception) -> None:
        assert self.callback is not None
        self.callback(message)

    def get(self, *kinds: type, seconds: float = 120.0) -> Message:
        """The next message of these kinds but RequestWork; others before it are dropped."""
        while True:
            message = self.received.get(timeout=seconds)
            if isinstance(message, kinds):
                return message

    def until_asked(self, weight_id: int) -> None:
        """Waits until the replica asks for work on these weights."""
        while self.requests.get(timeout=120).weight_id != weight_id:
            pass

    def forget(self) -> None:
        """Drops what came and nobody took."""
        for kept in (self.received, self.requests):
            with contextlib.suppress(queue.Empty):
                while True:
                    kept.get_nowait()

    def collect(self, count: int, *kinds: type) -> list[Message]:
        return [self.get(*kinds) for _ in range(count)]

    def grant(
        self,
        weight_id: int,
        groups: int,
        length: int = 6,
        temperature: float = 1.0,
        kind: str = "",
        evaluation: str = "",
    ) -> Grant:
        self.batches += 1
        first = self.batches * 1000
        batch = Grant(self.batches, weight_id, weight_id, [], temperature, length, evaluation)
        for g in range(groups):
            tokens = [(g * 31 + j) % 200 for j in range(5 + g)]
            samples = [Sample(first + g * 10 + i, 0) for i in range(4)]
            batch.groups.append(
                PromptGroup(
                    first + g, tokens, f"prompt {g}", {"kind": kind, "prompt": f"prompt {g}"}, samples
                )
            )
        self.tell(batch)
        return batch


class Replica:
    """A worker in a thread, with its controller, its relay's slots, and two models to serve."""

    def __init__(self, folder: Path, adjust: Callable[[RunConfig], None] = lambda _: None) -> None:
        """`adjust` changes its configuration, and its models' folders."""
        self.folder = folder
        self.models = [make_model(folder / f"model{seed}", seed) for seed in (0, 1)]
        (folder / "scorer_for_worker_test.py").write_text(SCORER)
        config = engine_config(self.models[0])
        config.relay.shm_dir = str(folder)
        config.reward.function = "scorer_for_worker_test.score"
        config.reward.timeout_seconds = 60.0
        adjust(config)
        self.writer = SlotWriter(str(folder), "run", 3, self.models[0])
        self.newest = -1  # the weight id of the newest slot
        self.controller = Controller()
        self.trace = Trace(folder, "rollout", 0)
        context = RoleContext(
            config, "rollout", 0, "here", folder, self.controller, Welcome("run"), self.trace
        )
        self.new_engine = engine_factory(config, 0, folder)
        self.worker = worker.RolloutWorker(context, self.new_engine)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:

        try:
            event_loop.run(self.worker.run())
        except BaseException as error:
            self.error = error

    def publish(self, model: int, weight_id: int) -> None:
        self.fill(model, weight_id)
        self.controller.tell(WeightsAvailable(weight_id, weight_id))

    def fill(self, model: int, weight_id: int) -> None:
        """Puts weights into a slot without a word to the worker."""
        fill_slot(self.writer, self.models[model], weight_id, step=weight_id)
        self.newest = weight_id

    def scheduler(self) -> psutil.Process:
        engine = psutil.Process(self.worker.engines.current.process.pid)
        return next(p for p in engine.children(recursive=True) if p.cmdline()[0].startswith("sglang::sched"))

    def ended(self, seconds: float = 60.0) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


@contextlib.contextmanager
def replica_of_turns(
    folder: Path, template: str, stops: list[int], adjust: Callable[[RunConfig], None]
) -> Iterator[Replica]:
    """A replica on weights 0 whose model has this chat template and these stop tokens."""

    def all_of_it(config: RunConfig) -> None:
        model = Path(config.model.path)
        (model / "chat_template.jinja").write_text(template)
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        adjust(config)

    replica = Replica(folder, all_of_it)
    fill_slot(replica.writer, replica.models[0], 0, step=0)
    yield replica
    replica.controller.tell(StopReceived("the tests are over"))
    assert replica.ended()
    replica.writer.close()
