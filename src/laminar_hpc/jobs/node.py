"""One node's part of a Slurm job, as slurm/common.sh starts it by srun:

    python -m laminar_hpc.jobs.node trainer|controller|rollouts|all [overrides]

Starts the node's processes of that role, each as launch/ROLE.sh would (`all`: its part of one torchrun
world), and waits until all have ended. The job's folder RUN_DIR/jobs holds what its nodes and its script
tell each other: `end.LIFE`, that it is to end, `term.LIFE`, that a node was sent TERM, and `again.LIFE`, that
it is to be requeued.

Slurm sends TERM at preemption, and also when another node of the job has died; the script finds out which.
The processes are told to leave once, by USR1 and a file that says why: a second signal would end them at
once. Exit code: 0 = done or left in order, 2 = refused, 1 = failed.
"""

import hashlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from laminar_hpc.cluster.full_disk import put
from laminar_hpc.cluster.launch import DEAF, LEAVES_ALONE, REFUSED
from laminar_hpc.cluster.lock_owner import Watched
from laminar_hpc.cluster.processes import die_with_parent, on_stop_signals
from laminar_hpc.cluster.run_end import goes_on, last_word
from laminar_hpc.cluster.turn import VARIABLE, give_turn
from laminar_hpc.cluster.waiting import Sign
from laminar_hpc.config.errors import LaminarError, print_lines
from laminar_hpc.config.file_systems import NETWORK_FILE_SYSTEMS, file_system
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.jobs.ending import (
    Ended,
    controller_since,
    has_more_to_do,
    is_final,
    is_near,
    seconds_to_go_on,
)
from laminar_hpc.jobs.machine_number import MachineNumber
from laminar_hpc.jobs.network import await_own_address, use_interface
from laminar_hpc.jobs.spare import ONE_WORLD_SECONDS, Turn, await_turn, hand_over, other_lives, spare_of
from laminar_hpc.jobs.world import world_command
from laminar_hpc.observability import console, output
from laminar_hpc.policies.restarts import Restarts

ROLES = ("trainer", "controller", "rollouts", "all")
_LOOK_SECONDS = 0.5
_RESTARTS_PER_HOUR = 10  # of a node's relays, and of its rollouts
_ALONE_SECONDS = 20.0  # of relays after their rollouts: at the end of a run they leave by themselves
_LIMIT = "limit"  # what `end` says where time is left; else it says why there is none
_NOW = "now"
_REASONS = {_LIMIT: "SIGUSR1", _NOW: "SIGTERM"}  # as the run records them
_AGAIN = ("relay", "rollout")  # a controller and trainers are started again by their own launcher


@dataclass(frozen=True)
class Place:
    """Where this process is, by Slurm's variables."""

    role: str
    node: int  # of the job, from 0
    nodes: int
    run_dir: Path
    life: str  # of the job: its id and how often it was requeued
    ends_at: float | None  # Unix time of the job's limit
    is_component: bool = False  # of a heterogeneous job, which ends as a whole

    @staticmethod
    def here(role: str) -> "Place":
        """Raises LaminarError for a process that slurm/common.sh did not start."""
        given = os.environ
        if role not in ROLES or "RUN_DIR" not in given or "LAMINAR_LIFE" not in given:
            raise LaminarError(
                f"python -m laminar_hpc.jobs.node {role}: this is for the scripts of slurm/; use "
                "`laminar submit ...`, or sbatch with one of them"
            )
        end = given.get("LAMINAR_JOB_END", "")
        return Place(
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


def commands(
    place: Place, config: RunConfig, words: list[str], address: str, machine: int = 0
) -> dict[str, list[str]]:
    """By role, what to start on this node, which is number `machine` of those with rollouts. Raises
    LaminarError where the trainers do not divide."""
    if place.role == "all":
        if file_system(place.run_dir) in NETWORK_FILE_SYSTEMS and not config.store_dir:
            words = [f"store_dir={local_store(place.run_dir)}", *words]
        return {"all": world_command(place.run_dir, place.life, place.node, place.nodes, address, words)}
    common = [f"run_dir={place.run_dir}", f"cluster.host={address}"]
    words = [*words, "resume=auto"]  # whatever they say: a requeued job goes on
    start = [sys.executable, "-m", "laminar_hpc.cluster.launch_role"]
    if place.role == "controller":
        own = [] if config.store_dir else [f"store_dir={local_store(place.run_dir)}"]
        if config.rollout.replicas_min is None:  # whoever leaves the queue later joins later
            own += ["rollout.replicas_min=1"]
        return {"controller": [*start, "controller", "1", *common, *own, *words]}
    if place.role == "trainer":
        trainer = config.trainer
        ranks = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel
        here, rest = divmod(ranks, place.nodes)
        if rest:
            raise LaminarError(
                f"{ranks} trainers (trainer.tensor_parallel x pipeline_parallel x data_parallel) do not "
                f"divide into {place.nodes} nodes: submit trainer.sbatch with another --nodes"
            )
        first = f"first_index={place.node * here}"
        return {"trainer": [*start, "trainer", str(here), *common, first, *words]}
    lanes = max(1, config.relay.lanes)
    return {
        "relay": [*start, "relay", str(lanes), *common, f"first_index={machine * lanes}", *words],
        "rollout": [*start, "rollout", str(replicas_here(config)), *common, *words],
    }


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


class Child:
    """One launcher of this node, started again after a death where nobody else does it."""

    def __init__(self, role: str, command: list[str], turn: Path | None = None, alone: bool = False) -> None:
        self._why = os.memfd_create("why")  # it is to leave
        told_in = f"/proc/{os.getpid()}/fd/{self._why}"
        own = {LEAVES_ALONE: "1"} if alone else {}
        self._environment = {**os.environ, DEAF: told_in, **own, **({VARIABLE: str(turn)} if turn else {})}
        self.role, self._command, self._restarts = role, command, Restarts(_RESTARTS_PER_HOUR)
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment, preexec_fn=die_with_parent)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """With all that it has started, which die with their parents."""
        self._process.kill()
        self._process.wait()

    def code(self, left: bool, again: Callable[[], bool]) -> int | None:
        """Its exit code; None while it runs, or, if the run goes on (`again`), runs again. `left`: it was
        told to leave."""
        code = self._process.poll()
        if left and code == -signal.SIGUSR1:  # before it could hear of it
            return 0
        if code is None or code in (0, REFUSED) or left or self.role not in _AGAIN or not again():
            return code
        why_not = self._restarts.refusal(f"exit code {code}", int(time.time()), time.time())
        if why_not:
            print(f"laminar: error: {self.role} is not started again: {why_not}", file=sys.stderr, flush=True)
            return code
        print(console.line("restart", f"{self.role}: it ended with exit code {code}"), flush=True)
        self._start()
        return None

    def leave(self, reason: str) -> None:
        """`reason`: what the run records of the stop."""
        os.pwrite(self._why, reason.encode(), 0)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)


def hear_orders(place: Place) -> None:
    """TERM and HUP are passed on to the script, which finds out what they mean. The others are heard too: the
    children would inherit that they are ignored."""

    def on_signal(number: int, _: object) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(OSError):
                place.file("term").touch()

    on_stop_signals(on_signal)


class Node:
    """The processes of this node, and whether they were told to leave. `turn`: the file of which they wait
    for their turn, if they do."""

    def __init__(self, place: Place, started: dict[str, list[str]], turn: Path | None = None) -> None:
        self._place, self._left, self.handed_over = place, False, False
        self.ended = Ended(False, False)
        self._stop_at: float | None = None
        self._alone = False  # only this job is to end, as far as one can know
        self._reason = "SIGUSR1"  # of the stop
        hear_orders(place)
        alone = place.leaves_alone
        self._children = [Child(role, command, turn, alone) for role, command in started.items()]

    @property
    def has_ended(self) -> bool:
        """Whether one of its processes has."""
        return any(child.has_ended for child in self._children)

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    def run(self) -> int:
        """Until all have ended; the first exit code that is not 0, the rollouts' before the relays'."""
        codes, result = dict[str, int](), 0
        alone_at, served_by = math.inf, None
        while len(codes) < len(self._children):
            self._look_for_the_end()
            for child in self._children:
                if child.role not in codes and (code := child.code(self._left, self._again)) is not None:
                    if not codes:
                        served_by = controller_since(self._place.run_dir)
                    codes[child.role] = code
                    alone_at = min(alone_at, time.monotonic() + _ALONE_SECONDS)
            result = codes.get("rollout", next((code for code in codes.values() if code), 0))
            if codes:
                self.ended = Ended(result == 0, self._is_told, served_by, self._place.leaves_alone)
            if self.ended.has_begun_again(self._place.run_dir) or time.monotonic() > alone_at:
                self._leave()  # relays without replicas, or the other way round, are of no use
            time.sleep(_LOOK_SECONDS)
        return result

    @property
    def _is_told(self) -> bool:
        return self._stop_at is not None

    def _again(self) -> bool:
        return not self._is_told and goes_on(self._place.run_dir)

    def _look_for_the_end(self) -> None:
        told = "" if self._left else self._told_by_the_script()
        self._reason = _REASONS.get(told, told) or self._reason
        if told and told != _LIMIT:
            self._stop_at, self._alone = 0.0, told == _NOW
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
        if place.role == "controller" and alone and (spare := spare_of(place.run_dir)):
            print(console.line("spare", f"{spare} takes over; the run goes on"), flush=True)
            self.handed_over = True
            self.kill()
            hand_over(place.run_dir)
        else:
            told = place.node == 0 or (place.role == "trainer" and place.leaves_alone)
            for child in self._children if told else []:
                child.leave(self._reason)


def run_in_turn(place: Place, started: Callable[[], dict[str, list[str]]]) -> tuple[int, bool]:
    """Starts what this node is for, as soon as no controller of another job lives, and waits for its end.
    Exit code, and whether the job is to be requeued."""
    with tempfile.TemporaryDirectory(prefix="laminar-turn-") as folder:
        for number in count():
            turn, node = _in_turn(place, started, Path(folder) / str(number))
            if turn is not Turn.START:
                return 0, not is_final(last_word(place.run_dir))
            node, before = node or Node(place, started()), last_word(place.run_dir)
            code, word = node.run(), last_word(place.run_dir)
            if node.handed_over:
                return 0, not is_final(word)
            if place.role == "controller" and word != before and is_final(word):  # nobody waits for it
                put(place.run_dir / "jobs" / ("failed" if word.startswith("failed") else "ended"))
            if code != REFUSED:
                return code, place.node == 0 and has_more_to_do(place.role, place.run_dir, node.ended)
            if place.role != "controller" or not other_lives(place.run_dir):  # else both began at once
                break
    return REFUSED, False


def _in_turn(
    place: Place, started: Callable[[], dict[str, list[str]]], file: Path
) -> tuple[Turn, Node | None]:
    """Returns when it is this job's turn, with the controller that was started meanwhile to be ready: it
    waits for `file`."""
    if place.role not in ("controller", "all") or place.node != 0:
        return Turn.START, None
    told, watched, ready = place.file("end").exists, Watched(), list[Node]()
    if place.role == "all":  # the ranks on other nodes would wait for this one's torchrun
        return await_turn(place.run_dir, told, ONE_WORLD_SECONDS), None
    begin, sign = lambda: ready.append(Node(place, started(), file)), Sign(place.file("spare"))
    turn = await_turn(place.run_dir, told, begin=begin, watched=watched, sign=sign)
    if ready and turn is Turn.START and not ready[0].has_ended:
        give_turn(file, watched)
        return turn, ready[0]
    for node in ready:
        node.kill()
    return turn, None


def main(arguments: list[str]) -> int:
    """See above."""
    die_with_parent()
    output.guard()
    machine = None
    try:
        place, words = Place.here(arguments[0]), arguments[1:]
        output.keep_in(place.run_dir)
        if place.role != "all" or place.node == 0:  # whose word the others may await in vain
            hear_orders(place)
        config = load_config(words)
        address = await_own_address(config.cluster.join_timeout_seconds)
        use_interface(address)
        machine = MachineNumber(place.run_dir, config.relay.lanes) if place.role == "rollouts" else None
        started = partial(commands, place, config, words, address, machine.number if machine else 0)
        code, again = run_in_turn(place, started)
    except LaminarError as error:
        print_lines(error)
        return REFUSED
    finally:
        if machine:
            machine.release()
    if again:
        put(place.file("again"))
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
