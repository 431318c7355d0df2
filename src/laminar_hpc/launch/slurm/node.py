"""One node's part of a Slurm job, as slurm/common.sh starts it by srun:

    python -m laminar_hpc.launch.slurm.node trainer|controller|rollouts|all [overrides]

Is the agent of the node: it starts the ranks of that role, as launch/ROLE.sh would (`all`: the node's part of
one world), and waits until all have ended. The job's folder RUN_DIR/jobs holds what its nodes and its script
tell each other: `end.LIFE`, that it is to end, `term.LIFE`, that a node was sent TERM, and `again.LIFE`, that
it is to be requeued.

Slurm sends TERM at preemption, and also when another node of the job has died; the script finds out which.
Exit code: 0 = done or left in order, 2 = refused, 1 = failed.
"""

import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, print_lines
from laminar_hpc.config.file_systems import NETWORK_FILE_SYSTEMS, file_system
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.launch import NodeAgent, WorkerGroup
from laminar_hpc.launch.launch_role import RolePart
from laminar_hpc.launch.machine_relays import MachineRelays
from laminar_hpc.launch.ranks import Ranks
from laminar_hpc.launch.slurm.ending import (
    JobEnding,
    controller_since,
    has_more_to_do,
    is_final,
    is_near,
    seconds_to_go_on,
)
from laminar_hpc.launch.slurm.machine_number import MachineNumber
from laminar_hpc.launch.slurm.network import await_own_address, use_interface
from laminar_hpc.launch.slurm.spare import hand_over, spare_of
from laminar_hpc.line.agent_line import REFUSED, RankOrders
from laminar_hpc.line.stop import ask_trainers_to_leave
from laminar_hpc.machine.observability import console, output
from laminar_hpc.machine.processes import die_with_parent, on_stop_signals
from laminar_hpc.policies.restarts import Restarts
from laminar_hpc.store.full_disk import put
from laminar_hpc.store.run_end import last_word

ROLES = ("trainer", "controller", "rollouts", "all")
_LOOK_SECONDS = 0.5
_ASK_SECONDS = 3.0
_LIMIT = "limit"  # what `end` says where time is left; else it says why there is none
_NOW = "now"
_REASONS = {_LIMIT: "SIGUSR1", _NOW: "SIGTERM"}  # as the run records them


@dataclass(frozen=True)
class NodePlace:
    """Where this process is, by Slurm's variables."""

    role: str
    node: int  # of the job, from 0
    nodes: int
    run_dir: Path
    life: str  # of the job: its id and how often it was requeued
    ends_at: float | None  # Unix time of the job's limit
    is_component: bool = False  # of a heterogeneous job, which ends as a whole

    @staticmethod
    def here(role: str) -> "NodePlace":
        """Raises LaminarError for a process that slurm/common.sh did not start."""
        given = os.environ
        if role not in ROLES or "RUN_DIR" not in given or "LAMINAR_LIFE" not in given:
            raise LaminarError(
                f"python -m laminar_hpc.launch.slurm.node {role}: this is for the scripts of slurm/; use "
                "`laminar submit ...`, or sbatch with one of them"
            )
        end = given.get("LAMINAR_JOB_END", "")
        return NodePlace(
            role,
            int(given.get("SLURM_NODEID", "0")),
            int(given.get("SLURM_JOB_NUM_NODES", "1")),
            Path(given["RUN_DIR"]),
            given["LAMINAR_LIFE"],
            float(end) if end.isdigit() else None,
            "SLURM_HET_SIZE" in given,
        )

    @property
    def leaves_alone(self) -> bool:
        """Whether the run goes on when this job is told of its end."""
        return self.role == "rollouts" or (self.role == "trainer" and not self.is_component)

    def file(self, kind: str) -> Path:
        return self.run_dir / "jobs" / f"{kind}.{self.life}"


def parts(
    place: NodePlace, config: RunConfig, words: list[str], address: str, machine: int = 0
) -> list[RolePart]:
    """What to start on this node, which is number `machine` of those with rollouts. Raises LaminarError where
    the trainers do not divide."""
    common = [f"run_dir={place.run_dir}", f"cluster.host={address}"]
    words = [*words, "resume=auto"]  # whatever they say: a requeued job goes on
    if place.role == "all":
        apart = file_system(place.run_dir) in NETWORK_FILE_SYSTEMS and not config.store_dir
        own = [f"store_dir={local_store(place.run_dir)}"] if apart else []
        return [RolePart("all", int(os.environ.get("NPROC_PER_NODE", "2")), [*common, *own, *words])]
    if place.role == "controller":
        own = [] if config.store_dir else [f"store_dir={local_store(place.run_dir)}"]
        if config.rollout.replicas_min is None:  # whoever leaves the queue later joins later
            own += ["rollout.replicas_min=1"]
        return [RolePart("controller", 1, [*common, *own, *words])]
    if place.role == "trainer":
        ranks = config.trainer.ranks
        here, rest = divmod(ranks, place.nodes)
        if rest:
            raise LaminarError(
                f"{ranks} trainers (trainer.tensor_parallel x context_parallel x pipeline_parallel x "
                f"data_parallel) do not divide into {place.nodes} nodes: submit trainer.sbatch with another "
                "--nodes"
            )
        return [RolePart("trainer", here, [*common, f"first_index={place.node * here}", *words])]
    lanes = max(1, config.relay.lanes)
    return [
        RolePart("relay", lanes, [*common, f"first_index={machine * lanes}", *words]),
        RolePart("rollout", replicas_here(config), [*common, *words]),
    ]


class WorldGroup(WorkerGroup):
    """This node's ranks of one world over all nodes of a job, whose death is the job's."""

    def __init__(self, place: NodePlace, part: RolePart, orders: RankOrders) -> None:
        self._node = place.node
        ranks = Ranks(range(part.processes), part.processes, place.node, place.nodes)
        super().__init__(load_config(part.words), part.words, ranks, Restarts(0), orders, place.life)

    def log(self) -> Path:
        """Beside the run's folder, which may not be there yet."""
        return self.run_dir.with_name(f"{self.run_dir.name}-launch{self._node}.log")


def start(place: NodePlace, found: list[RolePart]) -> list[WorkerGroup]:
    orders = RankOrders(deaf_to_term=True, spare=str(place.file("spare")))
    if place.role == "all":
        return [WorldGroup(place, part, orders) for part in found]
    return [group for part in found for group in part.start(orders, tended=True)]


def local_store(run_dir: Path) -> Path:
    """A folder of this run's own below STORE_DIR: runs of equal names do not meet there."""
    name = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return Path(os.environ.get("STORE_DIR") or tempfile.gettempdir()) / name


def replicas_here(config: RunConfig) -> int:
    """ROLLOUTS, else as many as the node's GPUs hold, one without GPUs."""
    given, gpus = os.environ.get("ROLLOUTS", ""), os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise LaminarError(f"ROLLOUTS={given}: the number of replicas on each node, from 1 on")
        return int(given)
    return max(1, int(gpus if gpus.isdigit() else 0) // max(1, config.rollout.tensor_parallel))


def hear_orders(place: NodePlace) -> None:
    """TERM and HUP are passed on to the script, which finds out what they mean. The others are heard too: the
    children would inherit that they are ignored."""

    def on_signal(number: int, _: object) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(OSError):
                place.file("term").touch()

    on_stop_signals(on_signal)


class Node:
    """The agent of this node, and whether it was told of the job's end."""

    def __init__(
        self, place: NodePlace, groups: list[WorkerGroup], relays: MachineRelays | None = None
    ) -> None:
        self._place = place
        self._groups = groups
        self._relays = relays
        self._agent = NodeAgent(place.run_dir, groups)
        self.ended: JobEnding | None = None  # once one of them has
        self.gave_way = False  # to another controller, or before it had begun
        self._left = False
        self._look_at = 0.0
        self._stop_at: float | None = None
        self._alone = False  # only this job is to end, as far as one can know
        self._reason = "SIGUSR1"  # of the stop
        hear_orders(place)

    def run(self) -> int:
        """Until all have ended; the exit code, of rollouts theirs, whatever the relays'."""
        self._agent.run(self._look)
        return self._note_ends()

    def _look(self) -> None:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            if self._relays is not None and not self._left:
                self._groups += self._relays.look()
            self._look_for_the_end()
            self._note_ends()

    def _note_ends(self) -> int:
        """Those so far. Relays that were not there when the run stopped leave its next controller."""
        place, codes = self._place, self._agent.codes()
        code = codes.get("rollout", max(codes.values(), default=0))
        if codes:
            served_by = self.ended.served_by if self.ended else controller_since(place.run_dir)
            self.ended = JobEnding(code == 0, self._stop_at is not None, served_by, place.leaves_alone)
            if self.ended.has_begun_again(place.run_dir):
                self._leave()
        return code

    def _look_for_the_end(self) -> None:
        told = "" if self._left else self._told_by_the_script()
        self._reason = _REASONS.get(told, told) or self._reason
        if told and told != _LIMIT:
            self._stop_at = 0.0
            self._alone = told == _NOW
        elif told and self._stop_at is None:
            now, ends_at = time.time(), self._place.ends_at
            left = None if ends_at is None else ends_at - now
            self._alone = not is_near(self._place.run_dir, left)
            seconds = seconds_to_go_on(self._place.role, self._place.run_dir, left)
            self._stop_at = now + seconds
            if seconds > 1 and self._place.node == 0:
                print(console.line("time limit", f"goes on for {seconds:.0f} s, then stops"), flush=True)
        if self._stop_at is not None and time.time() >= self._stop_at:
            self._leave()

    def _told_by_the_script(self) -> str:
        with suppress(OSError):
            return self._place.file("end").read_text().strip()
        return ""

    def _leave(self) -> None:
        """Once. One node is enough to stop the run, trainers leave it on all of theirs. A controller leaves
        the run to a spare, if there is one and the others' time is not over too."""
        if self._left:
            return
        self._left = True
        place, alone = self._place, self._alone and not self._place.is_component
        for group in self._groups:
            group.is_told = True  # and not started again
        if place.role in ("controller", "all") and not self._groups[0].life.joined_as:  # perhaps a spare
            self._give_way()
        elif place.role == "controller" and alone and (spare := spare_of(place.run_dir)):
            print(console.line("spare", f"{spare} takes over; the run goes on"), flush=True)
            self._give_way()
            hand_over(place.run_dir)
        elif place.role == "trainer" and place.leaves_alone:
            for group in self._groups:
                leave_run(group, self._reason)
        elif place.node == 0:
            self._agent.stop(self._reason)

    def _give_way(self) -> None:
        self.gave_way = True
        for group in self._groups:
            group.life.kill()


def leave_run(trainers: WorkerGroup, reason: str) -> None:
    """Has the trainers of all nodes leave after their step; asks repeatedly, as controllers change. Trainers
    that have not joined the run yet end at once."""

    def ask() -> None:
        while trainers.code is None and trainers.config.first_index == 0:
            ask_trainers_to_leave(trainers.run_dir, reason)
            time.sleep(_ASK_SECONDS)

    trainers.is_told = True
    if trainers.life.joined_as:
        threading.Thread(target=ask, daemon=True).start()
    else:
        trainers.leave()


def run_node(
    place: NodePlace, groups: list[WorkerGroup], relays: MachineRelays | None = None
) -> tuple[int, bool]:
    """Waits for the end of these. Exit code, and whether the job is to be requeued."""
    node, before = Node(place, groups, relays), last_word(place.run_dir)
    code, word = node.run(), last_word(place.run_dir)
    if node.gave_way:
        return 0, place.node == 0 and not is_final(word)
    if place.role == "controller" and word != before and is_final(word):  # nobody waits for it
        put(place.run_dir / "jobs" / ("failed" if word.startswith("failed") else "ended"))
    if code == REFUSED or place.node != 0 or node.ended is None:
        return code, False
    return code, has_more_to_do(place.role, place.run_dir, node.ended)


def main(arguments: list[str]) -> int:
    die_with_parent()
    output.guard()
    machine = relays = None
    try:
        place, words = NodePlace.here(arguments[0]), arguments[1:]
        output.keep_in(place.run_dir)
        if place.role != "all" or place.node == 0:  # whose word the others may await in vain
            hear_orders(place)
        config = load_config(words)
        address = await_own_address(config.cluster.join_timeout_seconds)
        use_interface(address)
        machine = MachineNumber(place.run_dir, config.relay.lanes) if place.role == "rollouts" else None
        found = parts(place, config, words, address, machine.number if machine else 0)
        if machine:
            start_relays = partial(start, place, [found.pop(0)])
            relays = MachineRelays(str(place.run_dir.resolve()), config.relay.shm_dir, start_relays)
        code, again = run_node(place, start(place, found), relays)
    except LaminarError as error:
        print_lines(error)
        return REFUSED
    finally:
        if relays:
            relays.close()
        if machine:
            machine.release()
    if again:
        put(place.file("again"))
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
