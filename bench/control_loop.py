"""What a turn of the controller costs with many waiting replicas, and how many trajectories it takes.

Turns: the real controller over a store on the disk, in this process, without sockets: what comes is handed to
it decoded, what it sends is encoded. GROUPS x SAMPLES trajectories are in flight at WORKING replicas on
machines of 8, and so many others have no work: admission lets nobody begin more. Each turn brings
TRAJECTORIES responses, their scores, and the pings of a tenth of all members. The trainer
takes batches, trains for STEP_TURNS turns and publishes; relays receive, and replicas without work pull, a
few in each turn. A turn that answers the trainer with a batch sends the plan of all that is trained on; it is
told apart (`batch_ms_max`). `turn_cpu_ms_p99` leaves out what the disk and other processes take. `status_ms`
is what status.json costs, once a second, beside the turns.

Load: the controller as a process, and REPLICAS emulated rollouts over encrypted sockets (control_crowd.py)
with responses of TOKENS tokens, whose payload files nobody writes here. `decision_seconds`: from each ping of
a member to its answer, which leaves with whatever the same turn has decided and written. `controller_gb`: its
largest resident memory; `controller_growth`: the same over that after a fifth of the time.

    python bench/control_loop.py [--json PATH] [--turns 3000] [--waiting 256,1024] [--seconds 300]

Goals: `turn_ms_p99_256` at most 50, `turn_ms_p99_1024` 100; `trajectories_per_second` 2,000
with `decision_seconds_p99` at most 1.
"""

import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import common
import psutil
from control_crowd import PER_MACHINE, record, step_metrics

from helpers.emulated.launch import prepare
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller import run as controller_run
from laminar_hpc.controller import snapshot
from laminar_hpc.controller.beginning import start_up
from laminar_hpc.controller.loop import Controller
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.data import Message, PromptGroup, ReplicaLoad, Sample
from laminar_hpc.line.messages.membership import Hello, Ping
from laminar_hpc.line.messages.publication import NewWeightId
from laminar_hpc.line.messages.rollouts import (
    Generated,
    Grant,
    RequestWork,
    Scored,
    WeightsAvailable,
    WeightsOpened,
)
from laminar_hpc.line.messages.training import Batch, Continue, Restored, StepDone, TakeBatch
from laminar_hpc.line.messages.wire import encode
from laminar_hpc.machine.collector import collect_rarely
from laminar_hpc.store import status

GROUPS, SAMPLES, BOUND = 8192, 16, 3  # BOUND steps ahead of the trainer
WORKING = 64
CURVE = [(1, 0.01), (64, 0.012)]  # requests, seconds of a decode step
TRAJECTORIES, PINGS, RELAYS, PULLS = 64, 0.1, 8, 32  # of a turn; of all members, how large a part pings
STEP_TURNS = 100
FRAMES = 1000  # at most, that a turn takes
REPLICAS, RATE, TOKENS = 256, 2200, 1000  # under load
COLUMNS = (
    "waiting",
    "in_flight",
    "turns",
    "steps",
    "turn_ms_median",
    "turn_ms_p99",
    "turn_ms_max",
    "turn_cpu_ms_p99",
    "batch_ms_max",
    "status_ms",
)


class Hub:
    """In the place of the sockets."""

    def __init__(self) -> None:
        self.address = SimpleNamespace(run_id="bench")
        self.arrived: deque[tuple[str, Message]] = deque()
        self.left: list[tuple[str, Message]] = []

    def announce(self, store_id: str, received: dict[str, int]) -> None: ...
    def committed(self) -> None: ...
    def end(self, identity: str) -> None: ...

    def received(self) -> dict[str, int]:
        return self._numbers

    def poll(self, seconds: float) -> list[tuple[str, Message]]:
        self.heard_until = time.monotonic()
        taken = [self.arrived.popleft() for _ in range(min(FRAMES, len(self.arrived)))]
        self._numbers = {identity: 1 for identity, _ in taken}
        return taken

    def send(self, identity: str, message: Message) -> None:
        encode(message)
        self.left.append((identity, message))


class Workers:
    """All members: rollouts that generate in random order, relays, and a trainer."""

    def __init__(self, controller: Controller, hub: Hub, rollouts: int) -> None:
        self.controller, self.hub, self.draw = controller, hub, random.Random(0)
        self.rollouts, self.relays = range(rollouts), range(-(-rollouts // PER_MACHINE))
        self.in_hand: list[tuple[int, PromptGroup, Sample, Grant]] = []
        self.left_of = dict.fromkeys(self.rollouts, 0)  # trajectories that each has in hand
        self.serves = dict.fromkeys(self.rollouts, 0)
        self.newest_batch: dict[int, int] = {}
        self.due: deque[tuple[str, list[Message]]] = deque()  # pulls and relays, some in each turn
        self.trains_until: int | None = None
        self.step = self.turns = 0
        self.everyone: Iterator[tuple[str, Message]] = itertools.cycle(
            [(f"rollout:{i}:", Ping(self._load(i))) for i in self.rollouts]
            + [(f"relay:{i}:", Ping()) for i in self.relays]
            + [("trainer:0:", Ping())]
        )

    def _load(self, replica: int) -> ReplicaLoad:
        return ReplicaLoad("draining", 0, 2, 0, 2, 0, 100 + replica, 10_000, 10.0, CURVE)

    def say(self, role: str, index: int, *messages: Message) -> None:
        self.hub.arrived.extend((f"{role}:{index}:", message) for message in messages)

    def join(self) -> None:
        self.say("trainer", 0, Hello("trainer", 0, "", os.getpid(), "apart"), Restored(None), NewWeightId(0))
        for i in self.relays:
            self.say(
                "relay", i, Hello("relay", i, "", os.getpid(), f"machine{i}"), RelayHas(0, 0, 1, 0.1, 0.0)
            )
        for i in self.rollouts:
            hello = Hello("rollout", i, "", os.getpid(), f"machine{i // PER_MACHINE}")
            opened = WeightsOpened(0, 0, 0.1, {"load": 0.1}, [], 0.0)
            self.say("rollout", i, hello, Ping(self._load(i)), opened, RequestWork(0))
        while self.hub.arrived or any(isinstance(message, Grant) for _, message in self.hub.left):
            self.hears()
            for i in self.relays:
                self.say("relay", i, Ping())
            self.turn()
        self.hears()
        self.say("trainer", 0, TakeBatch(0))

    def turn(self) -> tuple[float, float, bool]:
        """Milliseconds, those of CPU time, and whether the trainer got a batch."""
        begun, spent = time.perf_counter(), time.thread_time()
        self.controller.turn()
        took, spent = (time.perf_counter() - begun) * 1e3, (time.thread_time() - spent) * 1e3
        return took, spent, any(isinstance(message, Batch) for _, message in self.hub.left)

    def works(self) -> None:
        """What comes in the next turn."""
        self.turns += 1
        for _ in range(min(TRAJECTORIES, len(self.in_hand))):
            place = self.draw.randrange(len(self.in_hand))
            self.in_hand[place], self.in_hand[-1] = self.in_hand[-1], self.in_hand[place]
            replica, group, sample, grant = self.in_hand.pop()
            said = Scored(sample.trajectory_id, sample.attempt, float(self.draw.random() < 0.5), {}, "", 3.0)
            self.say(
                "rollout",
                replica,
                Generated(record(group, sample, replica, grant.weight_id, grant.weight_step, 4)),
                said,
            )
            self.left_of[replica] -= 1
            if not self.left_of[replica]:
                self.pulls(replica)
        for identity, ping in itertools.islice(
            self.everyone, int(PINGS * (len(self.rollouts) + len(self.relays)))
        ):
            self.hub.arrived.append((identity, ping))
        for _ in range(min(len(self.due), RELAYS + PULLS)):
            identity, messages = self.due.popleft()
            self.hub.arrived.extend((identity, message) for message in messages)
        if self.trains_until == self.turns:
            self.trains_until, self.step = None, self.step + 1
            self.say("trainer", 0, NewWeightId(self.step), StepDone(self.step - 1, step_metrics()))

    def pulls(self, replica: int) -> None:
        """It has nothing in hand: it loads newer weights, if there are any, and asks."""
        newest = self.controller.weights.newest_on(f"machine{replica // PER_MACHINE}")
        messages: list[Message] = []
        if newest is not None and newest.weight_id > self.serves[replica]:
            self.serves[replica] = newest.weight_id
            messages.append(WeightsOpened(*newest, 0.1, {"load": 0.1}, [], 0.0))
        messages.append(RequestWork(self.serves[replica], self.newest_batch.get(replica)))
        self.due.append((f"rollout:{replica}:", messages))

    def hears(self) -> None:
        """What the controller has sent."""
        sent, self.hub.left = self.hub.left, []
        for identity, message in sent:
            index = int(identity.split(":")[1])
            if isinstance(message, Grant):
                self.newest_batch[index] = message.batch_id
                new = [
                    (index, group, sample, message) for group in message.groups for sample in group.samples
                ]
                self.in_hand += new
                self.left_of[index] += len(new)
            elif isinstance(message, WeightsAvailable) and message.weight_id and not self.left_of[index]:
                self.pulls(index)
            elif isinstance(message, Batch):
                self.trains_until = self.turns + STEP_TURNS
            elif isinstance(message, Continue):
                newest = max(self.controller.weights.steps)
                self.due.extend(
                    (f"relay:{i}:", [RelayHas(newest, self.step, 1, 0.1, 0.0)]) for i in self.relays
                )
                self.say("trainer", 0, TakeBatch(self.step))


def controller_of(folder: Path, hub: Hub, waiting: int, seconds: float) -> Controller:
    config: RunConfig = prepare(folder, 1000, 16, 64)
    config.steps = 10_000
    config.algorithm.prompts_per_step = GROUPS // (BOUND + 1)
    config.algorithm.samples_per_prompt = SAMPLES
    config.pipeline.max_staleness, config.pipeline.local_batch_groups = BOUND, GROUPS // WORKING
    config.rollout.replicas = WORKING + waiting
    config.cluster.heartbeat_timeout_seconds = seconds
    relays = -(-config.rollout.replicas // PER_MACHINE)
    begun = start_up(config, lambda _: None)
    return controller_run.build(config, begun, hub, relays, "apart", lambda _: None)


def measured(waiting: int, turns: int) -> dict[str, float]:
    """With so many waiting replicas."""
    folder, hub = Path(tempfile.mkdtemp(prefix="laminar-turns-")), Hub()
    try:
        controller = controller_of(folder, hub, waiting, 3600.0)
        collect_rarely()
        workers = Workers(controller, hub, WORKING + waiting)
        workers.join()
        in_flight, took, spent, batches = len(workers.in_hand), [], [], [0.0]
        for _ in range(turns):
            workers.works()
            milliseconds, cpu, batch = workers.turn()
            (batches if batch else took).append(milliseconds)
            if not batch:
                spent.append(cpu)
            workers.hears()
        begun = time.perf_counter()
        status.write(Path(controller.config.run_dir), snapshot.status(controller))
        status_ms = (time.perf_counter() - begun) * 1e3
        for part in (controller.store, controller.metrics, controller.trace):
            part.close()
    finally:
        shutil.rmtree(folder)
    took.sort(), spent.sort()
    return {
        "waiting": waiting,
        "in_flight": in_flight,
        "turns": turns,
        "steps": workers.step,
        "turn_ms_median": statistics.median(took),
        "turn_ms_p99": took[int(0.99 * len(took))],
        "turn_ms_max": took[-1],
        "turn_cpu_ms_p99": spent[int(0.99 * len(spent))],
        "batch_ms_max": max(batches),
        "status_ms": status_ms,
    }


def under_load(seconds: float, folder: Path | None) -> dict[str, float]:
    """Of REPLICAS emulated rollouts that generate RATE trajectories a second."""
    root = Path(tempfile.mkdtemp(prefix="laminar-load-", dir=folder))
    config: RunConfig = prepare(root, 1000, 16, 2 * TOKENS)
    config.steps = 100_000
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = REPLICAS, SAMPLES
    config.pipeline.max_staleness, config.rollout.replicas = BOUND, REPLICAS
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(config))
    numbers = [str(number) for number in (REPLICAS, RATE, TOKENS, seconds)]
    with open(root / "controller.log", "wb") as log:
        controller = psutil.Popen(
            [sys.executable, "-m", "laminar_hpc.simulator.emulation", "controller", run_dir],
            stdout=log,
            stderr=log,
        )
        crowd = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("control_crowd.py"), run_dir, *numbers],
            stdout=subprocess.PIPE,
        )
    try:
        memory: list[float] = []
        while crowd.poll() is None and controller.poll() is None:
            memory.append(controller.memory_info().rss / 1e9)
            time.sleep(0.5)
        if crowd.poll() != 0 or crowd.stdout is None:
            raise SystemExit(f"the load has ended early; see {root}/controller.log")
        spent = controller.cpu_times()
        row = json.loads(crowd.stdout.read())
    finally:
        for process in (crowd, controller):
            if process.poll() is None:
                process.kill()
            process.wait()
    row |= {
        "controller_gb": max(memory),
        "controller_growth": max(memory) / max(memory[: max(1, len(memory) // 5)]),
        "controller_cpu_seconds": spent.user + spent.system,
        "seconds": seconds,
    }
    shutil.rmtree(root)
    return row


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--turns", type=int, default=3000, help="measured of each (default 3000)")
    options.add_argument(
        "--waiting",
        type=lambda text: [int(n) for n in text.split(",") if n],
        default=[256, 1024],
        help="replicas",
    )
    options.add_argument("--seconds", type=float, default=300.0, help="under load, 0: not (default 300)")
    options.add_argument("--folder", type=Path, help="of the store under load")
    chosen = options.parse_args()
    rows = [measured(waiting, chosen.turns) for waiting in chosen.waiting]
    figures = {f"turn_ms_p99_{row['waiting']}": row["turn_ms_p99"] for row in rows}
    if chosen.seconds:
        figures |= under_load(chosen.seconds, chosen.folder)
    common.finish(chosen, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
