"""The controller rank: owns the run from the first line to the last. Imports no torch.

It makes the run directory ready, prints the derived quantities, lets the others in, runs the loop until the
work is done or someone asks to stop, tells everybody to leave, and writes summary and report.
"""

import dataclasses
import logging
import secrets
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from laminar_hpc.cluster.address import ADDRESS_FILE, read_address
from laminar_hpc.cluster.channel import RUN_FAILED
from laminar_hpc.cluster.folders import slots_root
from laminar_hpc.cluster.hub import Hub
from laminar_hpc.cluster.loop_watch import LoopWatch
from laminar_hpc.cluster.open_files import allow_connections
from laminar_hpc.cluster.run_lock import RunLock, refuse_if_held
from laminar_hpc.cluster.stop import forget_request, left_request, request_is_left
from laminar_hpc.cluster.waiting import who_waits
from laminar_hpc.config.check import Derived, check, check_machine, derived_values, warnings
from laminar_hpc.config.errors import LaminarError, PermanentFailure, before_it_begins
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller import snapshot
from laminar_hpc.controller.collector import collect_rarely
from laminar_hpc.controller.ending import finish
from laminar_hpc.controller.evaluations import Evaluations
from laminar_hpc.controller.journal import Journal
from laminar_hpc.controller.loop import Controller
from laminar_hpc.controller.members import Members
from laminar_hpc.controller.recovery import retire, settle
from laminar_hpc.controller.rewards import try_rewards
from laminar_hpc.controller.rundir import (
    Start,
    cause_of_death,
    journal_folder,
    note_restart,
    prepare,
    store_directory,
    store_path,
    torchrun_identity,
    unusable,
    was_restarted,
)
from laminar_hpc.controller.shared import NUMBERS
from laminar_hpc.controller.store import Store
from laminar_hpc.controller.store_check import check_store, damage_of
from laminar_hpc.controller.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt, load_run_prompts
from laminar_hpc.observability import console, status
from laminar_hpc.observability.durations import read_durations
from laminar_hpc.observability.metrics import MetricsWriter
from laminar_hpc.observability.trace import Trace
from laminar_hpc.observability.wandb_mirror import WandbMirror, check_wandb
from laminar_hpc.policies.sampling import GroupSize, prompt_index
from laminar_hpc.policies.stopping import stop_limit
from laminar_hpc.pretrained import recorded_name

log = logging.getLogger(__name__)
_STATUS_SECONDS = 1.0
_STORE_CHECK_SECONDS = 60.0
_TURN_SECONDS = 10.0  # of the loop at least, before it is said to stand still


def start_up(config: RunConfig, say: Callable[[str], None]) -> tuple[Derived, Start, RunLock]:
    """Checks everything that can be checked without the others, then takes the run directory and its lock."""
    run_dir = Path(config.run_dir)
    refuse_if_held(run_dir)
    derived = check(config)
    check_machine(config, derived)
    members = derived.trainer_ranks + derived.rollout_ranks * (1 + derived.relay_ranks_per_machine)
    allow_connections(members, meshes=False)
    check_wandb(config.observability.wandb)
    under_way = config.role != "all" and config.resume == "auto" and read_address(run_dir) is not None
    for text in [] if under_way else console.derived_block(derived_values(config, derived)):
        say(text)  # else the controller that has died has said it
    for text in warnings(config, derived):
        say(console.line("warning", text))
    try:
        lock = RunLock([run_dir, store_directory(config)], lambda text: say(console.line("set-up", text)))
    except OSError as error:
        raise unusable(run_dir, error) from error
    try:
        return derived, take_run_dir(config, lock, say), lock
    except BaseException:
        lock.release()
        raise


def take_run_dir(config: RunConfig, lock: RunLock, say: Callable[[str], None]) -> Start:
    """A fresh run directory, or the earlier run's, of which the store is known to be sound."""
    start = prepare(config, lock)
    if start.moved_to:
        text = f"an earlier run was moved to {start.moved_to} (resume=auto goes on with it instead)"
        say(console.line("set-up", text))
    store, journal, replay = store_path(config), journal_folder(config), config.source != "rollout"
    seconds = _STORE_CHECK_SECONDS
    if journal.is_dir() or config.store_dir:
        unite = settle if config.store_dir else retire
        damage = damage_of(store, seconds)
        unite(journal, store, say, damage)
        seconds = seconds if damage else 0.0  # all of it was read just now
    check_store(store, Path(config.run_dir), start.restored_step or 0, replay, seconds)
    return start


def build(
    config: RunConfig,
    derived: Derived,
    start: Start,
    hub: Hub,
    relays: int,
    machine: str,
    say: Callable[[str], None],
) -> Controller:
    """Everything that the loop needs. The trainers say later which step the store goes back to."""
    with before_it_begins():
        prompts, held_out = load_run_prompts(config, say)
        try_rewards(config, say, prompts)
    store = Store(store_directory(config), journal=_journal(config, say))
    epoch = store.get("restore_epoch", -1) + 1
    store.put("restore_epoch", epoch)
    tracker = _tracker(config, store, prompts)
    source = Path(config.source.removeprefix("replay:")) if config.source.startswith("replay:") else None
    replay = Store(source, read_only=True) if source else None
    evaluations = _evaluations(config, held_out, epoch * NUMBERS, store)
    if was_restarted(config):
        cause = cause_of_death(Path(config.run_dir))
        say(console.line("restart", f"by torchrun: {cause}"))
        note_restart(config, cause, start.restored_step or 0)
    known = store.get_text("slots") if config.role != "all" else ""  # to workers that are still there
    slots = known or hub.address.run_id
    store.put_text("slots", slots)
    controller = Controller(
        config,
        derived,
        hub,
        store,
        tracker,
        evaluations,
        MetricsWriter(Path(config.run_dir), _mirror(config)),
        Members(machine, config.cluster.heartbeat_timeout_seconds),
        relays,
        start.restored_step,
        slots,
        replay,
        say,
        Trace(Path(config.run_dir), "controller", 0),
    )
    _note_start(controller, start.restored_step, epoch)
    return controller


def _journal(config: RunConfig, say: Callable[[str], None]) -> Journal | None:
    """Of a store that lies apart from the run directory."""
    return Journal(journal_folder(config), store_path(config), say) if config.store_dir else None


def _tracker(config: RunConfig, store: Store, prompts: list[Prompt]) -> TrajectoryTracker:
    algorithm = config.algorithm
    samples = algorithm.samples_per_prompt
    size = GroupSize(algorithm.first_samples or samples, algorithm.more_samples, samples)
    order = partial(prompt_index, rows=len(prompts), seed=config.seed, shuffle=config.data.shuffle)
    tracker = TrajectoryTracker(store, prompts, size, order, algorithm.zero_variance == "filter")
    tracker.recover()
    return tracker


def _evaluations(
    config: RunConfig, held_out: dict[str, list[Prompt]], first_attempt: int, store: Store
) -> Evaluations | None:
    if not held_out:
        return None
    sampling, samples = config.sampling, config.evaluation.samples
    length = sampling.max_response_tokens
    return Evaluations(held_out, samples, sampling.temperature, length, first_attempt, store)


def _note_start(controller: Controller, restored_step: int | None, epoch: int) -> None:
    """The line of this launch. Trainers that have outlived the last one lose no step."""
    config, state = controller.config, controller.state
    controller.metrics.write(
        "start",
        restored_step=(state.trainer_step or None) if state.gang else restored_step,
        pipeline=config.pipeline.name,
        epoch=epoch,
        derived=dataclasses.asdict(controller.derived),
        torchrun=torchrun_identity(),
        model=str(recorded_name(config.model.path) or config.model.path),
    )


def _mirror(config: RunConfig) -> WandbMirror | None:
    mode, project = config.observability.wandb, config.observability.wandb_project
    if mode == "off":
        return None
    return WandbMirror(Path(config.run_dir), mode, project, dataclasses.asdict(config))


def run(
    config: RunConfig,
    relays: int,
    machine: str,
    say: Callable[[str], None],
    redirect_output: Callable[[], None],
) -> None:
    """The whole life of the controller. Raises LaminarError when the run fails; returns when it is done or
    was stopped."""
    with before_it_begins():
        derived, start, lock = start_up(config, say)
    with ExitStack() as at_the_end:
        at_the_end.callback(lock.release)
        run_dir, controller = Path(config.run_dir), None
        redirect_output()
        (run_dir / "config.yaml").write_text(dump_config(config))
        # before they see this controller
        waiting = who_waits(run_dir) if request_is_left(run_dir) else []
        run_id = f"{run_dir.resolve().name}-{secrets.token_hex(4)}"
        hub = Hub(run_dir, run_id, config.cluster.host, config.cluster.port, machine)
        try:
            controller = build(config, derived, start, hub, relays, machine, say)
            collect_rarely()
            received: list[str] = []
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, lambda n, _: received.append(signal.Signals(n).name))
            say_stuck = partial(_say_stuck, say)
            most = max(_TURN_SECONDS, config.cluster.heartbeat_timeout_seconds / 2)
            watch = LoopWatch("the controller's loop", _TURN_SECONDS, most, say_stuck)
            at_the_end.callback(watch.close)
            take_up_request(controller, run_dir, waiting)
            loop(controller, received, lock, watch)
            state = controller.state
            reason = f"failed: {state.failure}" if state.failure else state.stopping or "done"
            controller.metrics.write("end", reason=reason, step=state.trainer_step)
        except BaseException as error:
            if controller is not None:
                step = controller.state.trainer_step
                with suppress(OSError):  # a full disk: `error` itself is what the user should read
                    controller.metrics.write("end", reason=f"failed: {error}", step=step)
            raise
        finally:
            close(controller, hub, run_dir)
            if controller is not None:  # a relay that was killed could not
                shutil.rmtree(slots_root(config.relay.shm_dir, controller.slots), ignore_errors=True)
        finish(run_dir, state.stopping, say)
        if state.failure:
            raise PermanentFailure(state.failure)


def take_up_request(controller: Controller, run_dir: Path, waiting: list[str]) -> None:
    """That of `laminar stop`, which no controller has had, if the roles that it was for still wait."""
    reason = left_request(run_dir, controller.store.store_id)
    if reason and controller.state.gang and waiting:
        controller.request_stop(reason)
        controller.turn()  # on record
    forget_request(run_dir)


def _say_stuck(say: Callable[[str], None], text: str) -> None:
    say(console.line("warning", f"{text} (logs/controller0.log)"))


def loop(controller: Controller, received: list[str], lock: RunLock, watch: LoopWatch) -> None:
    """Turns until the work is done, then until all have said goodbye. Bounded by the join and stop time
    limits. `received`: names of signals, filled by their handler."""
    state, members, cluster = controller.state, controller.members, controller.config.cluster
    wanted = {"trainer": controller.derived.trainer_ranks, "rollout": controller.crew.minimum}
    if state.gang:  # a run that is under way goes on with the replicas that there are
        wanted = {"trainer": 0 if state.trainer_done else wanted["trainer"], "rollout": 1}
    joined, joining_until = False, time.monotonic() + cluster.join_timeout_seconds
    stop_until, stop_seconds, shown = None, 0.0, 0.0
    while not state.finished:
        controller.turn()
        watch.turned()
        if lock.lost:
            raise LaminarError(lock.lost)
        if time.monotonic() - shown > _STATUS_SECONDS:
            shown = time.monotonic()
            status.write(Path(controller.config.run_dir), snapshot.status(controller))
        if received:
            controller.request_stop(received[0])
        if state.stopping and (members.at("trainer") or not state.gang):
            stop_seconds = stop_seconds or _stop_limit(controller.config)
            stop_until = stop_until or time.monotonic() + stop_seconds
            if time.monotonic() > stop_until:
                raise LaminarError(
                    f"{state.stopping}: the trainer did not finish step {state.trainer_step + 1} and its "
                    f"checkpoint within {stop_seconds:.0f} s, twice what earlier ones took and at least "
                    "cluster.stop_timeout_seconds"
                )
        missing = {} if joined else {role: n - members.count(role) for role, n in wanted.items()}
        joined = joined or not any(number > 0 for number in missing.values())
        if not joined and time.monotonic() > joining_until:
            ranks = ", ".join(f"{number} {role}" for role, number in missing.items() if number > 0)
            raise LaminarError(
                f"after {cluster.join_timeout_seconds:.0f} s these ranks have not joined: {ranks}; see the "
                "logs folder of the run directory"
            )
    controller.tell_all_to_leave(state.stopping or "done")
    patience = time.monotonic() + cluster.stop_timeout_seconds
    while members.by_place and time.monotonic() < patience:
        controller.turn()
        watch.turned()
    controller.continuation.over()
    for member in members.by_place.values():
        log.error("%s did not leave within %.0f s", member.name, cluster.stop_timeout_seconds)


def _stop_limit(config: RunConfig) -> float:
    """Seconds for an orderly stop, by the steps and checkpoints before."""
    measured = read_durations(Path(config.run_dir))
    return stop_limit(*measured, config.cluster.stop_timeout_seconds, config.cluster.join_timeout_seconds)


def close(controller: Controller | None, hub: Hub, run_dir: Path) -> None:
    """Tells whoever is left to leave, and lets go of files and sockets; also after a failure."""
    if controller is not None:
        controller.tell_all_to_leave(RUN_FAILED if not controller.state.finished else "done")
        controller.send_all()
        closes = [controller.store.close, controller.metrics.close, controller.trace.close]
        if controller.archiving:
            closes.insert(0, controller.archiving.close)
        for close_part in closes:
            try:
                close_part()
            except (OSError, sqlite3.Error):  # a full disk: the others are closed all the same
                log.exception("%s could not be done", close_part.__qualname__)
    hub.close()
    now = read_address(run_dir)
    if now is not None and now.run_id == hub.address.run_id:  # another's stays
        (run_dir / ADDRESS_FILE).unlink(missing_ok=True)
