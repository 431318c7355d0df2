"""The agent of a machine: it forks the ranks of its part of a run, waits for them, and starts those again
that may be.

`laminar train` (launch/supervisor.py), the scripts of launch/ (launch_role.py), each node of a Slurm job
(launch/slurm/node.py) and each machine that `laminar launch` reaches by ssh (launch/ssh/host.py) are one.
They differ in what they start, and in where their orders come from: signals, a file, or the connection.
"""

import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.leaving import LEAVES
from laminar_hpc.launch.ranks import Life, Ranks
from laminar_hpc.launch.slurm.ending import BY_THE_USER
from laminar_hpc.line.address import read_address
from laminar_hpc.line.agent_line import PERMANENT, REFUSED, RankOrders
from laminar_hpc.line.stop import request_stop
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.files.folders import (
    ENGINE_FOLDER_PREFIX,
    PAYLOADS_FOLDER_PREFIX,
    remove_abandoned,
    remove_dead_slots,
)
from laminar_hpc.machine.locks.run_lock import refuse_if_held
from laminar_hpc.machine.observability import console
from laminar_hpc.policies.restarts import Restarts
from laminar_hpc.store.full_disk import NO_ROOM, ROOM_LOOK_SECONDS, has_room

REPEAT_SECONDS = 2.0  # `timeout` and some terminals send the same signal twice at once
# for a controller to take a stop: turns of seconds are normal, and the shared file system may stand still;
# and for one that is dead, or not ready yet
_LIVE_SECONDS, _DEAD_SECONDS = 10.0, 2.0
_GONE_SECONDS = 20.0  # ranks that were told to end are killed after this
_ALONE_SECONDS = 20.0  # of relays after their rollouts: at the end of a run they leave by themselves
_LOOK_SECONDS = 0.1
_NO_ORDERS = RankOrders()


class WorkerGroup:
    """Ranks that end together, and are started together again if that may be."""

    def __init__(
        self,
        config: RunConfig,
        words: list[str],
        ranks: Ranks,
        restarts: Restarts,
        orders: RankOrders = _NO_ORDERS,
        run_id: str = "",
        advice: str = "",
    ) -> None:
        """`run_id`: equal on all machines of one world. `advice`: behind how a rank died."""
        self.config = config
        self.role = config.role
        self.orders = orders
        self.advice = advice
        self.run_dir = Path(config.run_dir)
        self.logs = self.run_dir / "logs"
        self.restarts = restarts
        self.code: int | None = None  # when they have ended for good
        self.is_told = False  # of their end, or the run's
        self._is_ended = False  # at once
        self._words = words
        self._begin = partial(Life, ranks=ranks, orders=orders, run_id=run_id)
        self._room_until: float | None = None
        self.start([])

    # ---- what kinds of groups differ in --------------------------------------------------------------------

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def log(self) -> Path:
        """For what ranks print before they have logs of their own."""
        return self.logs / "launch.log"

    def may_go_on(self) -> bool:
        """Whether there is a run for them to go on with."""
        return True

    def again(self, cause: str, step: int) -> list[str]:
        """Says that they are started again, after this step; more words for them."""
        count = f"{self.role}: {len(self.restarts.times)} of {self.restarts.per_hour} within an hour"
        print(console.line("restart", f"{count}: {cause or 'told to leave'}"), flush=True)
        return ["resume=auto"] if self.role == "controller" else []

    def explain(self, rank: int, number: int) -> str:
        """How a rank has ended that could not say so itself; "" if nobody needs to be told."""
        if self._is_ended:
            return ""
        name, how = self.name(rank), f"ended with exit code {number}"
        if number < 0:
            how = f"was killed by {signal.Signals(-number).name}"
        log = self.logs / f"{name.replace(' ', '')}.log"
        return f"{name} {how}; see {log if log.exists() else self.logs}{self.advice}"

    # ---- their lives ---------------------------------------------------------------------------------------

    def start(self, more: list[str]) -> None:
        self.life = self._begin([*self._words, *more])
        self._told = 0  # how many of the causes of its end the user has seen
        if self._is_ended:  # it came between two lives
            self.end()

    def look(self) -> None:
        """Notices what has happened; sets `code` at the end of the last life."""
        if self._room_until is not None:
            self._look_for_room(self._room_until)
        elif self.life.look():
            self._end_life()
        elif not self.restarts.per_hour:
            self.print_error()

    def _end_life(self) -> None:
        life = self.life
        life.close(self.log())
        remove_dead_slots(self.config.relay.shm_dir)
        for prefix in (ENGINE_FOLDER_PREFIX, PAYLOADS_FOLDER_PREFIX):
            remove_abandoned(Path(tempfile.gettempdir()), prefix)
        rank, number = life.failed or (0, int(self._is_ended))
        left = self.role in LEAVES and self.is_told and not self._is_ended
        if number == 0 or (left and number == -signal.SIGTERM):
            self.code = 0  # also where it was told before it could hear of it
            return
        if not life.causes and (why := self.explain(rank, number)):
            life.causes.append(why)
        self._code = REFUSED if life.is_refused or number == REFUSED else 1
        # another rank may have ended before the one whose disk is full
        if NO_ROOM in self.cause and self.role != "all" and self.restarts.per_hour and not self.is_told:
            print(console.line("waits", f"{self.role}: {self.cause.partition(': make room')[0]}"), flush=True)
            self._room_until = time.monotonic() + self.config.cluster.join_timeout_seconds
            self._room_look = time.monotonic() + ROOM_LOOK_SECONDS  # a quota cannot be looked at
            return
        is_permanent = self._code == REFUSED or number == PERMANENT or NO_ROOM in self.cause
        self._go_on_or_end(self.is_told or is_permanent or not self.may_go_on())

    def _look_for_room(self, until: float) -> None:
        now = time.monotonic()
        if now >= self._room_look or self.is_told:
            self._room_look = now + ROOM_LOOK_SECONDS
            is_over = self.is_told or now > until
            if is_over or has_room(self.config):
                self._room_until = None
                self._go_on_or_end(is_over, gone=True)

    def _go_on_or_end(self, is_final: bool, gone: bool = False) -> None:
        step, why_not = last_step(self.run_dir), ""
        if not is_final:
            # without a relay or a rollout the run goes on, however often it has died meanwhile
            gone = gone or self.role in LEAVES
            why_not = self.restarts.refusal(self.cause, step, time.time(), gone)
        if is_final or why_not:
            self.print_error(f"; not started again: {why_not}" if why_not and self.restarts.per_hour else "")
            self.code = self._code
        else:
            self.start(self.again(self.cause.removesuffix(self.advice), step))

    @property
    def cause(self) -> str:
        return "; ".join(self.life.causes)

    def print_error(self, more: str = "") -> None:
        """Tells the user why it failed, each line once."""
        for text in self.life.causes[self._told :]:
            print(f"laminar: error: {text}{more}", file=sys.stderr, flush=True)
        self._told = len(self.life.causes)

    def leave(self) -> None:
        """Relays and rollouts leave the run, which goes on. Without the others there is none: they end."""
        if self.role not in LEAVES:
            return self.end()
        self.is_told = True
        return self.life.end(_GONE_SECONDS, alone=True)

    def end(self) -> None:
        self.is_told = True
        self._is_ended = True
        self.life.end(_GONE_SECONDS)


def last_step(run_dir: Path) -> int:
    """The newest step done; 0 before the first."""
    return next((r["step"] for r in reversed(list(jsonl.read(run_dir / "metrics.jsonl", "step")))), 0)


class NodeAgent:
    """The groups of this machine."""

    def __init__(
        self,
        run_dir: Path,
        groups: Sequence[WorkerGroup],
        one_terminal: bool = False,
        ask: Callable[[str], None] | None = None,
    ) -> None:
        """`ask`: has the run stopped in order for a reason; raises LaminarError where there is none."""
        self.groups = groups
        self._run_dir = run_dir
        self._one_terminal = one_terminal
        self._ask = ask or self._ask_controller
        self._signals = 0
        self._asked = 0.0
        self._alone_at = math.inf

    def run(self, look: Callable[[], None] = lambda: None) -> int:
        """Until all have ended; `look` takes orders. Exit code: 0 = done or left, 2 = refused, 1 = failed."""
        while going_on := [group for group in self.groups if group.code is None]:
            look()
            for group in going_on:
                group.look()
                if group.code is not None:
                    self._after(group, group.code)
            if time.monotonic() > self._alone_at:
                self._alone_at = math.inf
                self._leave("relay", "rollout")
            time.sleep(_LOOK_SECONDS)
        return max(self.codes().values(), default=0)

    def codes(self) -> dict[str, int]:
        """Returns, by role, the exit codes of groups that have ended as a whole."""
        going_on = {group.role for group in self.groups if group.code is None}
        found: dict[str, int] = {}
        for group in self.groups:
            if group.role not in going_on and group.code is not None:
                found[group.role] = max(found.get(group.role, 0), group.code)
        return found

    def _after(self, group: WorkerGroup, code: int) -> None:
        """What the end of one is to the others here."""
        others = {other.role for other in self.groups if other.code is None}
        if group.role == "controller" and code:
            self.leave()
        elif group.role == "trainer" and code and others:  # the run would wait for nobody
            with suppress(LaminarError, OSError):
                request_stop(self._run_dir, BY_THE_USER)
        elif group.role == "rollout" and code == REFUSED:  # the others wait for this one to say so
            self._leave("rollout")
        # relays without replicas, or the other way round, are of no use where nobody starts them again
        half = {"relay": "rollout", "rollout": "relay"}.get(group.role)
        if half in others and group.role not in others and group.restarts.per_hour:
            self._alone_at = min(self._alone_at, time.monotonic() + _ALONE_SECONDS)

    def on_signal(self, number: int, _: object = None) -> None:
        """The first is a stop in order; the next ones end what still runs."""
        now = time.monotonic()
        if self._signals and now - self._asked < REPEAT_SECONDS:
            return
        self._signals += 1
        self._asked = now
        if self._signals == 1:
            self.stop(signal.Signals(number).name)
        elif self._signals == 2 and self._is_essential:
            self.leave()
        else:
            for group in self.groups:
                group.end()

    @property
    def _is_essential(self) -> bool:
        """Whether the run cannot go on without this machine."""
        return any(group.role not in LEAVES for group in self.groups)

    def stop(self, reason: str) -> None:
        """Has the run stopped in order. A machine of relays and rollouts alone leaves it, as does one where
        nobody can be told of it."""
        if not self._is_essential:
            return self.leave()
        for group in self.groups:
            group.is_told = group.is_told or not self._one_terminal
        try:
            return self._ask(reason)
        except (LaminarError, OSError):
            print(f"laminar: {reason} before the run was up: ending it", file=sys.stderr, flush=True)
            return self.leave()

    def _ask_controller(self, reason: str) -> None:
        if not request_stop(self._run_dir, reason, self._patience()):
            text = "there is no controller now, the next one gets the request"
            print(f"laminar: {reason}: {text}", file=sys.stderr, flush=True)

    def _patience(self) -> float:
        with suppress(Refused):
            refuse_if_held(self._run_dir)
            return _DEAD_SECONDS
        address = read_address(self._run_dir)
        return _LIVE_SECONDS if address and address.store_id else _DEAD_SECONDS

    def leave(self) -> None:
        self._leave(*(group.role for group in self.groups))

    def _leave(self, *roles: str) -> None:
        for group in self.groups:
            if group.role in roles and group.code is None:
                group.leave()
