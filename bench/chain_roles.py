"""A run of the relay tier alone: the real controller, the real publisher and real relays, each a process of
its own, without a model.

The stand-in trainer publishes random bytes; everything else is the code of a run. Used by
bench/relay_chain.py and tests/weights/relay/. `ChainRun` starts and ends the processes; each relay counts as
a machine of its own, in a network namespace of its own if one is named.
"""

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
from network import enter

from laminar_hpc.__main__ import main as run_rank
from laminar_hpc.__main__ import redirect_output
from laminar_hpc.config.check import derive
from laminar_hpc.config.load import load_config
from laminar_hpc.controller.fleet.members import Members
from laminar_hpc.controller.fleet.replicas import Replicas
from laminar_hpc.controller.loop import make_controller
from laminar_hpc.controller.shared import Outbox, RunState
from laminar_hpc.controller.staleness import StalenessControl
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.line.address import ADDRESS_FILE, read_address, write_address
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.hub import Hub
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.files.folders import claim, remove_abandoned
from laminar_hpc.machine.observability.metrics import MetricsWriter
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store.store import Store
from laminar_hpc.trainer.canonical.exchange import Exchange
from laminar_hpc.trainer.publishing.publisher import Publisher
from laminar_hpc.weights.kernels.sums import add_sums, tensor_sums
from laminar_hpc.weights.lanes import Lane
from laminar_hpc.weights.slots import SlotGone, SlotReader
from laminar_hpc.weights.stream import TensorSpan

RUN_ID = "chain"
START_SECONDS = 180  # on a busy machine
LOOK_SECONDS = 0.02  # between two looks at what the others have done
TOLD_SECONDS = 10.0  # after which the controller has written down what it has done
CHANGED_EVERY = 100  # with relay.delta=auto one word in so many changes


# ---- what the processes do ---------------------------------------------------------------------------------


def controller(words: list[str], relays: int, namespace: str | None) -> None:
    """The real controller's loop over an empty prompt pool, until the file `stop` is there."""
    die_with_parent()
    enter(namespace)
    config = load_config([*words, "role=controller"])
    run_dir = Path(config.run_dir)
    redirect_output(run_dir, "controller0")
    hub = Hub(run_dir, RUN_ID, config.cluster.host, 0, "controller")
    store = Store(run_dir)
    book = TrajectoryTracker(store, [], GroupSize(1, 0, 1), lambda draw: 0)
    seconds = config.cluster.heartbeat_timeout_seconds
    members = Members("controller", seconds, seconds)
    metrics, trace = MetricsWriter(run_dir), Trace(run_dir, "controller", 0)
    tables = Tables(
        config=config,
        derived=derive(config),
        state=RunState(0),
        members=members,
        outbox=Outbox(),
        metrics=metrics,
        say=print,
        store=store,
        tracker=book,
        evaluations=None,
        replay=None,
        slots=RUN_ID,
        replicas=Replicas(),
        pool=PartialResponsePool(),
        staleness=StalenessControl(config, store),
    )
    loop = make_controller(tables, hub, trace, relays)
    chain: list[int] = []
    chains = jsonl.Appender(run_dir / "chains.jsonl")
    while not (run_dir / "stop").exists():
        loop.turn()
        if loop.weights.chains[0].order != chain:
            chain = loop.weights.chains[0].order
            chains.write({"time": time.time(), "chain": chain})
    loop.tell_all_to_leave("done")
    until = time.monotonic() + 5
    while members.by_place and time.monotonic() < until:
        loop.turn()
    sys.stdout.flush()
    os._exit(0)


class RandomModel:
    """In the trainer's place: a few tensors whose bytes are others at every step; their sums go to
    sums/<step>.json. With `every`, one word in so many of them changes from one step to the next."""

    def __init__(self, run_dir: Path, size: int, every: int = 0) -> None:
        self._sums, self._every = run_dir / "sums", every
        self._sums.mkdir(exist_ok=True)
        self.step = 0
        self.device, self.publishing, self.lanes = (
            torch.device("cpu"),
            Exchange([0], 60.0),
            [Lane(0, 0, size // 4 * 4)],
        )
        rest = size // 4 - 1003 - 2 * (size // 12)
        self._shapes = [("a", (size // 12,)), ("odd", (17, 59)), ("b", (size // 12,)), ("c", (rest,))]

    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, shape, torch.float32) for name, shape in self._shapes]

    def pack(
        self, spans: Sequence[TensorSpan], bucket: torch.Tensor, lane: int
    ) -> Callable[[], list[tuple[int, int]]]:
        """Bytes that follow from the step alone, and their sums; those of whole tensors go to
        sums/<step>.json with the last bucket."""
        while spans[0].first and (self._sums.parent / "hold").exists():  # in the middle of a publication
            (self._sums.parent / "held").touch()
            time.sleep(0.01)
        factor = np.uint32(
            2654435761 if self._every else np.random.default_rng(self.step).integers(1 << 31) | 1
        )
        for span in spans:
            words = bucket[span.offset : span.offset + 4 * (span.last - span.first)].numpy().view(np.uint32)
            np.multiply(np.arange(span.first, span.last, dtype=np.uint32), factor, out=words)
            if self._every:
                words[-span.first % self._every :: self._every] += np.uint32(self.step)
            else:
                words += factor
        sums = [tensor_sums(bucket[p.offset : p.offset + 4 * (p.last - p.first)], p.first) for p in spans]
        if spans[0].tensor == spans[0].first == 0:
            self._whole = [(0, 0)] * len(self._shapes)
        for span, both in zip(spans, sums, strict=True):
            self._whole[span.tensor] = add_sums([self._whole[span.tensor], both])
        if spans[-1].tensor == len(self._shapes) - 1 and spans[-1].last == self._shapes[-1][1][0]:
            (self._sums / f"{self.step}.json").write_text(json.dumps(self._whole))
        return lambda: sums

    def probe_logprobs(self) -> list[float]:
        return []


def trainer(
    words: list[str], size: int, commands: Connection, namespace: str | None, make: Callable | None
) -> None:
    """A stand-in for the trainer: the real publisher, told by `commands` when to publish. Answers how fast
    its link is. `make(run_dir, size)`: its model, by default a RandomModel."""
    die_with_parent()
    enter(namespace)
    faulthandler.register(signal.SIGUSR1)
    config = load_config([*words, "role=trainer"])
    run_dir = Path(config.run_dir)
    hello = Hello("trainer", 0, uuid.uuid4().hex[:8], os.getpid(), "trainer")
    channel = Channel(
        run_dir, hello, config.cluster.join_timeout_seconds, config.cluster.heartbeat_timeout_seconds
    )
    redirect_output(run_dir, "trainer0")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    every = CHANGED_EVERY if config.relay.delta == "auto" else 0
    model = make(run_dir, size) if make else RandomModel(run_dir, size, every)
    context = RoleContext(
        config, "trainer", 0, "trainer", run_dir, channel, channel.welcome, Trace(run_dir, "trainer", 0)
    )
    publisher = Publisher(context, model)
    try:
        while True:
            step = commands.recv()
            if step is None:
                break
            model.step = step
            began = time.monotonic()
            publisher.publish(step)
            stall = time.monotonic() - began
            link = publisher.lanes.mine[0].link
            commands.send((stall, (link.start_seconds, link.seconds_per_byte) if link else None))
    except (StopReceived, EOFError):
        pass
    channel.close()
    os._exit(0)


def relay(words: list[str], index: int, namespace: str | None) -> None:
    """The real relay rank, as an agent would start it; it takes itself for a machine of its own."""
    enter(namespace)
    gc.freeze()  # a collection would touch, and so copy, every page that the forked process shares
    faulthandler.register(signal.SIGUSR1)  # what each thread does goes to the log
    socket.gethostname = lambda: f"host{index}"
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os._exit(
        run_rank(
            [*words, "role=relay", f"first_index={index}", f"relay.shm_dir={shared_memory(words, index)}"]
        )
    )


def shared_memory(words: list[str], index: int) -> Path:
    return (
        next(Path(word.split("=", 1)[1]) for word in words if word.startswith("relay.shm_dir="))
        / f"relay{index}"
    )


# ---- the run -----------------------------------------------------------------------------------------------


class ChainRun:
    """A trainer's stand-in, a controller and relays 0..relays-1. `namespace(name)` gives the network
    namespace of "trainer" (where the controller lives as well) and of relay numbers."""

    def __init__(
        self,
        folder: Path,
        relays: int,
        size: int,
        *words: str,
        host: str = "127.0.0.1",
        namespace: Callable[[object], str | None] = lambda _: None,
        model: Callable | None = None,
    ) -> None:
        self._model = model
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True)
        remove_abandoned(Path("/dev/shm"), "laminar-chain-")
        self._shm = Path(tempfile.mkdtemp(prefix="laminar-chain-", dir="/dev/shm"))
        claim(self._shm)
        self.words = [
            "experiment=demo",
            f"run_dir={self.run_dir}",
            f"cluster.host={host}",
            f"relay.shm_dir={self._shm}",
            f"cluster.join_timeout_seconds={START_SECONDS}",
            *words,
        ]
        self._namespace = namespace
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["chain_roles", "laminar_hpc.weights.relay.run"])
        self.relays: dict[int, multiprocessing.Process] = {}
        self._earlier: list[multiprocessing.Process] = []  # trainers
        self.step = 0
        self._checked: dict[
            int, int
        ] = {}  # relay -> the newest id that was compared with what the trainer sent
        self._others = [
            self._start(controller, self.words, relays, namespace("trainer")),
            self.start_trainer(size),
        ]
        for index in range(relays):
            self.start_relay(index)

    def _start(self, target: Callable, *args: object) -> multiprocessing.Process:
        process = self._context.Process(target=target, args=args)
        process.start()
        return process

    def start_trainer(self, size: int) -> multiprocessing.Process:
        """`publish` is told to this one from here on."""
        self._commands, theirs = self._context.Pipe()
        return self._start(trainer, self.words, size, theirs, self._namespace("trainer"), self._model)

    @property
    def trainer_pid(self) -> int:
        pid = self._others[1].pid
        assert pid is not None
        return pid

    def replace_trainer(self, size: int) -> None:
        """By the next one; the earlier one is left as it is."""
        self._earlier.append(self._others[1])
        self._others[1] = self.start_trainer(size)

    def leave_trainer(self) -> None:
        """It leaves in order, and nobody has its place yet."""
        self._commands.send(None)
        self._others[1].join(START_SECONDS)

    def begin_to_publish(self) -> None:
        """One publication more, which stands still in its middle, once it is there, for as long as the file
        `hold` exists."""
        (self.run_dir / "hold").touch()
        self.publish()
        until = time.monotonic() + START_SECONDS
        while not (self.run_dir / "held").exists():
            assert time.monotonic() < until, "no byte has left"
            time.sleep(0.02)

    def start_relay(self, index: int, *words: str) -> None:
        shared_memory(self.words, index).mkdir(exist_ok=True)
        self.relays[index] = self._start(relay, [*self.words, *words], index, self._namespace(index))

    def start_far_relay(self, index: int, place: str) -> Path:
        """One at another place, with a run directory of its own, in which there is only the controller's
        address, and which is returned."""
        folder = self.run_dir.parent / f"far{index}"
        folder.mkdir(exist_ok=True)
        self.until((self.run_dir / ADDRESS_FILE).exists, "no controller", START_SECONDS)
        address = read_address(self.run_dir)
        assert address is not None
        write_address(folder, address)
        self.start_relay(index, f"run_dir={folder}", f"cluster.place={place}")
        return folder

    def relay_memory(self, index: int) -> Path:
        """The folder for shared memory of a relay's machine."""
        return shared_memory(self.words, index)

    def publish(self) -> tuple[float, float] | None:
        """One publication more; returns when it is staged: (Ts, Tb) of the trainer's link, None while it has
        none."""
        self.step += 1
        self._commands.send(self.step)
        sentinels = [process.sentinel for process in self._others]
        if self._commands not in wait([self._commands, *sentinels], START_SECONDS):
            ended = [process.name for process in self._others if not process.is_alive()]
            what = f"has ended: {ended}" if ended else f"was blocked for {START_SECONDS} s"
            raise TimeoutError(f"the controller's or the trainer's stand-in {what}; see {self.run_dir}/logs")
        stall, link = self._commands.recv()
        self.stall = stall
        return link

    def newest(self, index: int) -> tuple[int, int]:
        """(weight id, step) that a rollout beside this relay would load, (-1, -1) without any. Fails if it is
        not what the trainer sent."""
        reader = SlotReader(str(shared_memory(self.words, index)), RUN_ID)
        for _ in range(100):
            handle = reader.newest()
            if handle is None:
                return -1, -1
            if handle.weight_id == self._checked.get(index):
                return handle.weight_id, handle.step
            try:
                with reader.lease(handle):
                    self.check(handle)
                self._checked[index] = handle.weight_id
                return handle.weight_id, handle.step
            except SlotGone:
                continue
        raise AssertionError("no slot could be read")

    def check(self, handle) -> None:
        file = handle.directory / "model.safetensors"
        data = np.memmap(
            file, dtype=np.uint8, mode="r", offset=file.stat().st_size - handle.manifest.data_bytes
        )
        sent = json.loads((self.run_dir / "sums" / f"{handle.step}.json").read_text())
        for entry, both in zip(handle.manifest.tensors, sent, strict=True):
            held = tensor_sums(torch.from_numpy(np.array(data[entry.offset : entry.offset + entry.nbytes])))
            assert held == tuple(both) == (entry.sum_words, entry.sum_indexed), (
                f"{handle.directory}: {entry.name} is not what was sent"
            )

    def wait(self, indices: list[int], step: int, seconds: float) -> float:
        """Until all of these relays hold the weights of `step` or newer ones; returns the seconds it took.
        Fails after `seconds`."""
        began = time.monotonic()
        while True:
            steps = {index: self.newest(index)[1] for index in indices}
            took = time.monotonic() - began
            if all(each >= step for each in steps.values()):
                return took
            if took > seconds:
                for process in (self._others[1], *(self.relays[index] for index in indices)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGUSR1)
                raise AssertionError(
                    f"after {seconds:.0f} s relays hold steps {steps} instead of {step}; "
                    f"chain {self.chains()[-1:]}"
                )
            time.sleep(LOOK_SECONDS)

    def chains(self) -> list[dict]:
        """Every order that the chain has had: {time, chain}."""
        path = self.run_dir / "chains.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def held(self, index: int) -> int:
        """The step of the newest weights of this relay, unchecked; -1 without any."""
        newest = SlotReader(str(shared_memory(self.words, index)), RUN_ID).newest()
        return -1 if newest is None else newest.step

    def until(self, true: Callable[[], bool], what: str, seconds: float = TOLD_SECONDS) -> None:
        """Waits until the controller, a process of its own, has told of what it has done."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"{what}; chain {self.chains()[-1:]}"
            time.sleep(LOOK_SECONDS)

    def until_chain(self, order: list[int]) -> None:
        self.until(lambda: self.chains()[-1]["chain"] == order, f"the chain is not {order}")

    def said(self) -> str:
        """What the controller told the user and logged."""
        return (self.run_dir / "logs" / "controller0.log").read_text()

    def close(self) -> None:
        """Ends everything; what does not leave in order is killed."""
        (self.run_dir / "stop").touch()
        with contextlib.suppress(OSError):
            self._commands.send(None)
        everyone = [*self._others, *self._earlier, *self.relays.values()]
        until = time.monotonic() + 6
        for process in everyone:
            process.join(max(0.1, until - time.monotonic()))
        for process in everyone:
            if process.is_alive():
                process.kill()
            process.join(5)
        shutil.rmtree(self._shm, ignore_errors=True)
