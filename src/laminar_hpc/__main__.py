"""What an agent (launch/launch.py), or the user's own torchrun, starts: rank -> role -> run.

    torchrun --nproc-per-node=4 -m laminar_hpc experiment=demo            one world with all roles
    torchrun --nproc-per-node=1 -m laminar_hpc role=relay run_dir=...     roles apart

A rank prints only what a user should read; all else goes to run_dir/logs/<role><index>.log once the run
directory is there.

With --max-restarts=N torchrun starts all ranks again when one has died, and the run goes on from its newest
checkpoint, whatever `resume` says. `laminar train restarts=N` does the same, N times an hour, and says why.
"""

import importlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.config.check import check, derive, derived_values, missing_inputs
from laminar_hpc.config.errors import LaminarError, PermanentFailure, Refused
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.pretrained import follow, prepare_rank
from laminar_hpc.launch.leaving import leave_at_once, watch_signals
from laminar_hpc.launch.placement import place
from laminar_hpc.line.address import keep_to_loopback, launch_id
from laminar_hpc.line.agent_line import FAILED_ELSEWHERE, PERMANENT, REFUSED, RankReport, report
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import RUN_FAILED, StopReceived, Terminated, TrainersReplaced
from laminar_hpc.line.messages.membership import UNNUMBERED, Failure, Hello
from laminar_hpc.line.starter_id import own_starter_id
from laminar_hpc.machine.collector import importing
from laminar_hpc.machine.devices import use_devices
from laminar_hpc.machine.gpu_memory import check_gpus, gigabytes_of_gpus
from laminar_hpc.machine.observability import console, output
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.machine.processes import die_with_parent, machine_name
from laminar_hpc.machine.roles import RoleOfRank
from laminar_hpc.report.ending import close_completed, finish
from laminar_hpc.store.full_disk import full_disk_text
from laminar_hpc.store.rundir import completed_step, was_restarted

SPEAK_SECONDS = 10.0  # for rank 0 to say an error that all ranks see


def redirect_output(run_dir: Path, name: str) -> None:
    """Everything this process and its children print goes to its log."""
    path = run_dir / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


class UserTerminal:
    """The user's terminal: the standard output and error that this process was started with."""

    def __init__(self) -> None:
        self._out = output.ConsoleStream(os.dup(1))
        self._error = output.ConsoleStream(os.dup(2))

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def print_error(self, text: str, refused: bool = False) -> None:
        """Through the agent that has forked this process, if one has."""
        if not report(RankReport(text, refused)):
            print(f"laminar: error: {'refused: ' * refused}{text}", file=self._error, flush=True)


# imported when the role is known: a role that needs no torch does not wait for it
_WORKERS = {
    "trainer": "laminar_hpc.trainer.loop",
    "relay": "laminar_hpc.weights.relay.run",
    "rollout": "laminar_hpc.rollout.role",
}


def _channel(config: RunConfig, hello: Hello) -> Channel:
    """Joins the run; a world of all roles ends with its controller."""
    one_world, cluster = config.role == "all", config.cluster
    patience = 0.0 if one_world else cluster.join_timeout_seconds
    launch = launch_id() if one_world else ""
    limits = (cluster.join_timeout_seconds, cluster.heartbeat_timeout_seconds, patience)
    return Channel(Path(config.run_dir), hello, *limits, launch)


def run_worker(
    config: RunConfig,
    mine: RoleOfRank,
    here: list[RoleOfRank],
    joined_as: Callable[[RoleOfRank], None],
    code_of: Callable[[BaseException], int],
) -> None:
    """Joins the run, then runs the role. A failure is told to the controller before it is raised. `joined_as`
    hears which place it has in the run; `code_of` says an error to the user."""
    use_devices(config, here, mine)
    keep_to_loopback(config.cluster.host)
    joined = watch_signals(config.role)
    run_dir, machine = Path(config.run_dir), machine_name(config.relay.shm_dir)
    index = UNNUMBERED if config.role == "rollout" else mine.index
    starter_id = own_starter_id() if config.role == "rollout" else ""
    who = (mine.role, index, uuid.uuid4().hex[:8], os.getpid(), machine)
    hello = Hello(*who, place=config.cluster.place, starter_id=starter_id)
    channel = _channel(config, hello)
    joined.append(channel)
    mine = RoleOfRank(mine.role, channel.index)
    joined_as(mine)
    channel.when_replaced = leave_at_once
    redirect_output(run_dir, f"{mine.role}{mine.index}")
    goodbye = ends = False

    def tell(error: BaseException) -> None:
        channel.send(Failure(f"{type(error).__name__}: {error}", isinstance(error, PermanentFailure)))

    def fail(error: BaseException) -> None:
        if not ends:  # else the main thread has its own
            code = code_of(error)
            tell(error)
            channel.close(goodbye=False)
            output.drain()
            os._exit(code)

    channel.when_failed = fail
    try:
        with importing():
            module = importlib.import_module(_WORKERS[mine.role])
        trace = Trace(run_dir, mine.role, mine.index)
        config = follow(config, channel.welcome.model)
        rank = (mine.role, mine.index, machine, run_dir)
        module.run(RoleContext(config, *rank, channel, channel.welcome, trace))
        goodbye = True
    except (StopReceived, Terminated):
        goodbye = True
        raise
    except BaseException as error:
        ends = True
        tell(error)
        raise
    finally:
        ends = True
        channel.close(goodbye)


def run_controller(config: RunConfig, relays: int, say: Callable[[str], None]) -> None:
    """The life of the controller's rank; it prints to logs/controller0.log once run_dir is there."""
    from laminar_hpc.controller.run import run

    run(
        config,
        relays,
        machine_name(config.relay.shm_dir),
        say,
        lambda: redirect_output(Path(config.run_dir), "controller0"),
        finish,
    )


def cure(error: BaseException) -> str:
    """What to do about an error of a library, where that is known. By name: torch is not imported for it."""
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "; lower trainer.tokens_per_microbatch, set "
            "trainer.recompute_activations=full or use more trainer ranks"
        )
    return ""


def wait_for_rank_0() -> None:
    """Until the end of rank 0 is signalled, which says what all ranks see; at most SPEAK_SECONDS."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigtimedwait(signals, SPEAK_SECONDS)


class Rank:
    """This process from its words to its end: what it prints, and its exit code."""

    def __init__(self) -> None:
        self._user = UserTerminal()
        self._started = time.monotonic()
        self._mine: RoleOfRank | None = None
        self._config: RunConfig | None = None

    def run(self, overrides: list[str]) -> None:
        """Finds its role and plays it, shows a dry run, or does nothing for a run that is complete."""
        user = self._user
        config = load_config(overrides)
        output.keep_in(Path(config.run_dir))
        config = self._config = prepare_rank(config, user.say, user.print_error)
        mine, here, relays = place(config)
        self._mine = mine
        if os.environ.get("LOCAL_RANK", "0") == "0" and not config.dry_run and (sizes := gigabytes_of_gpus()):
            check_gpus(config, derive(config), here, sizes)
        if mine.role == "spare":  # of a node with fewer roles than ranks
            return
        if config.dry_run:
            if mine.role == "controller":
                importlib.import_module("laminar_hpc.controller.trajectories.rewards").check_rewards(config)
                derived = derived_values(config, check(config))
                for text in console.dry_run_lines(derived, missing_inputs(config)):
                    user.say(text)
            return
        if was_restarted(config):
            config.resume = "auto"
        if completed_step(config) is not None:  # no rank waits for another
            if mine.role == "controller":
                close_completed(config, user.say)
            return
        if mine.role == "controller":
            run_controller(config, relays, user.say)
        else:
            run_worker(config, mine, here, self._joined, self.code_of)

    def _joined(self, mine: RoleOfRank) -> None:
        self._mine = mine
        report(RankReport(joined_as=f"{mine.role} {mine.index}"))

    def _speaks(self) -> bool:
        """Whether it is for this rank to say an error: one of its own, or, for rank 0, one that all see."""
        return self._mine is not None or os.environ.get("RANK", "0") == "0"

    def refused(self, error: Refused) -> int:
        if not self._speaks():
            wait_for_rank_0()
            return REFUSED
        for line in str(error).splitlines():
            self._user.print_error(line, refused=True)
        return REFUSED

    def failed(self, error: LaminarError) -> int:
        """An error with a text of ours."""
        mine = self._mine
        if str(error) == "a worker has failed":  # it has said itself why
            return FAILED_ELSEWHERE
        if self._speaks():
            named = mine is not None and mine.role != "controller"
            self._user.print_error(f"{mine.role} {mine.index}: {error}" if mine and named else str(error))
        else:
            wait_for_rank_0()
        if isinstance(error, PermanentFailure):
            return PERMANENT
        return 1 if mine is not None and time.monotonic() - self._started > 1 else REFUSED

    def code_of(self, error: BaseException) -> int:
        """Says to the user what needs to be said of the `error` that ends this process; its exit code."""
        match error:
            case Terminated():  # it has left in order
                return 0
            case TrainersReplaced():  # the controller has said why
                return FAILED_ELSEWHERE
            case StopReceived():
                return FAILED_ELSEWHERE if error.reason == RUN_FAILED else 0
            case Refused():
                return self.refused(error)
            case LaminarError():
                return self.failed(error)
        return self.crashed(error)

    def crashed(self, error: BaseException) -> int:
        """Any other error; its traceback goes to the log."""
        logging.getLogger(__name__).error("failed", exc_info=True)
        mine = self._mine
        who = f"{mine.role} {mine.index}" if mine else "start-up"
        full = full_disk_text(error, self._config) if mine and self._config else ""
        words = str(error).splitlines()[0] if str(error) else ""
        where = "(the traceback is in the run directory's logs/)"
        self._user.print_error(f"{who}: {full or f'{type(error).__name__}: {words}{cure(error)} {where}'}")
        return PERMANENT if full else 1


def main(overrides: list[str]) -> int:
    """Exit code: 0 = done or stopped in order, 1 = failed, 2 = refused before it began, 3 = failed
    for good."""
    die_with_parent()
    output.guard()
    rank = Rank()
    try:
        rank.run(overrides)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        return rank.code_of(error)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    output.drain()
    os._exit(code)  # threads of libraries must not keep a finished rank alive
