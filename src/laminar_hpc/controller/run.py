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
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, PermanentFailure, before_it_begins
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.teachers import check_rows
from laminar_hpc.controller import snapshot
from laminar_hpc.controller.beginning import Begun, start_up
from laminar_hpc.controller.bulk_door import bulk_door
from laminar_hpc.controller.fleet.members import Members, rollout_silence
from laminar_hpc.controller.fleet.replicas import Replicas
from laminar_hpc.controller.fleet.trainer_generation import StopCutShort
from laminar_hpc.controller.loop import Controller, make_controller
from laminar_hpc.controller.shared import NUMBERS, Outbox, RunState
from laminar_hpc.controller.staleness import StalenessControl
from laminar_hpc.controller.standstill import Standstill
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.controller.trajectories.rewards import say_doubts, try_rewards
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.data.pretrained import recorded_name
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.environments.run_prompts import load_run_prompts
from laminar_hpc.line.address import ADDRESS_FILE, read_address
from laminar_hpc.line.agent_line import orders
from laminar_hpc.line.endings import RUN_FAILED
from laminar_hpc.line.hub import Hub
from laminar_hpc.line.stop import forget_request, left_request, request_is_left
from laminar_hpc.line.waiting import are_queued, who_waits
from laminar_hpc.machine.collector import collect_rarely
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.files.folders import slots_root
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.observability.durations import read_durations
from laminar_hpc.machine.observability.metrics import MetricsWriter
from laminar_hpc.machine.observability.prometheus import prometheus
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.machine.observability.wandb_mirror import WandbMirror
from laminar_hpc.machine.processes import on_stop_signals
from laminar_hpc.policies.sampling import GroupSize, prompt_index
from laminar_hpc.policies.stopping import stop_limit
from laminar_hpc.store import status
from laminar_hpc.store.full_disk import is_full_disk
from laminar_hpc.store.journal import Journal
from laminar_hpc.store.rundir import (
    cause_of_death,
    journal_folder,
    note_restart,
    store_directory,
    store_path,
    torchrun_identity,
    was_restarted,
)
from laminar_hpc.store.same_run import check_same_prompts
from laminar_hpc.store.store import Store

log = logging.getLogger(__name__)
_STATUS_SECONDS = 1.0


def build(
    config: RunConfig, begun: Begun, hub: Hub, relays: int, machine: str, say: Callable[[str], None]
) -> Controller:
    """Everything that the loop needs. The trainers say later which step the store goes back to."""
    with before_it_begins():
        prompts, held_out = load_run_prompts(config, say)
        check_same_prompts(store_path(config), prompts)
        check_rows(config.teacher, (prompt.row for prompt in prompts))
        try_rewards(config, say, prompts)
        say_doubts(config, say, [prompts, *held_out.values()])
    start, lock = begun.start, begun.lock
    journal = _journal(config, begun, say)
    store = Store(store_directory(config), journal=journal, assure=lock.assure, say=say)
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
    tables = Tables(
        config=config,
        derived=begun.derived,
        state=RunState(start.restored_step or 0),
        members=_members(config, machine),
        outbox=Outbox(),
        metrics=MetricsWriter(Path(config.run_dir), _mirror(config), lock.assure, say),
        say=say,
        store=store,
        tracker=tracker,
        staleness=StalenessControl(config, store),
        evaluations=evaluations,
        replay=replay,
        slots=slots,
        replicas=Replicas(),
        pool=PartialResponsePool(),
    )
    controller = make_controller(tables, hub, Trace(Path(config.run_dir), "controller", 0), relays)
    _note_start(controller, start.restored_step, epoch)
    return controller


def _members(config: RunConfig, machine: str) -> Members:
    seconds = config.cluster.heartbeat_timeout_seconds
    return Members(machine, seconds, seconds if config.role == "all" else rollout_silence(seconds))


def _journal(config: RunConfig, begun: Begun, say: Callable[[str], None]) -> Journal | None:
    """Returns the journal of a store that lies apart from the run directory."""
    if not config.store_dir:
        return None
    lock = begun.lock
    return Journal(journal_folder(config), store_path(config), say, begun.era, lambda: lock.is_sure)


def _tracker(config: RunConfig, store: Store, prompts: list[Prompt]) -> TrajectoryTracker:
    algorithm = config.algorithm
    samples = algorithm.samples_per_prompt
    size = GroupSize(algorithm.first_samples or samples, algorithm.more_samples, samples)
    order = partial(prompt_index, rows=len(prompts), seed=config.seed, shuffle=config.data.shuffle)
    filters, longest = algorithm.zero_variance == "filter", config.sampling.max_response_tokens
    block = algorithm.prompts_per_step if config.pipeline.dispatch == "longest_first" else 1
    tracker = TrajectoryTracker(store, prompts, size, order, filters, longest, block)
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
        restored_step=(state.trainer_step or None) if state.trainer_generation else restored_step,
        pipeline=config.pipeline.name,
        refresh=config.pipeline.refresh,
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
    finish: Callable[[Path, str, Callable[[str], None]], None],
) -> None:
    """The whole life of the controller. It returns when the run is done or was stopped. `finish` writes the
    report while the run directory is still locked. Raises LaminarError when the run fails."""
    with ExitStack() as at_the_end:
        begun = _begin(config, say, at_the_end)
        lock = begun.lock
        run_dir, controller, dies = Path(config.run_dir), None, False
        redirect_output()
        # before they see this controller
        waiting = who_waits(run_dir) if request_is_left(run_dir) else []
        run_id = f"{run_dir.resolve().name}-{secrets.token_hex(4)}"
        hub = Hub(run_dir, run_id, config.cluster.host, config.cluster.port, machine)
        try:
            controller = build(config, begun, hub, relays, machine, say)
            at_the_end.enter_context(bulk_door(controller, say, lambda: lock.is_sure and not dies))
            # a refused resume leaves that of the run as it was
            durable.replace(run_dir / "config.yaml", dump_config(config).encode())
            collect_rarely()
            received: list[str] = []
            on_stop_signals(lambda number, _: hear(number, received))
            take_up_request(controller, run_dir, waiting)
            with closing(Standstill(config.cluster, lock, say)) as watch:
                if controller.archiving:
                    controller.archiving.at_work = watch.turned
                loop(controller, received, lock, watch)
            lock.assure()
            state = controller.state
            reason = f"failed: {state.failure}" if state.failure else state.stopping or "done"
            controller.metrics.write("end", reason=reason, step=state.trainer_step)
        except BaseException as error:
            # the others wait for the next one, which is started when there is room (launch/launch_role.py)
            dies = config.role != "all" and is_full_disk(error)
            if controller is not None and lock.is_sure and not dies:
                _note_failure(controller, error)
            raise
        finally:
            replaced = dies or not lock.is_sure
            close(controller, hub, run_dir, replaced)
            if controller is not None and not replaced:  # a relay that was killed could not
                shutil.rmtree(slots_root(config.relay.shm_dir, controller.slots), ignore_errors=True)
        finish(run_dir, state.stopping, say)
        if state.failure:
            raise PermanentFailure(state.failure)


def _begin(config: RunConfig, say: Callable[[str], None], at_the_end: ExitStack) -> Begun:
    """Takes the run directory and the port of its figures, which `at_the_end` lets go. Raises Refused."""
    with before_it_begins():
        begun = start_up(config, say)
        at_the_end.callback(begun.lock.release)
        at_the_end.enter_context(prometheus(config, say, begun.under_way))
    return begun


def _note_failure(controller: Controller, error: BaseException) -> None:
    """The run's last record. A job that was told of its end is requeued all the same."""
    state = controller.state
    word = state.stopping if isinstance(error, StopCutShort) else "failed"
    with suppress(OSError):  # a full disk: `error` itself is what the user should read
        controller.metrics.write("end", reason=f"{word}: {error}", step=state.trainer_step)


def hear(number: int, received: list[str]) -> None:
    """A signal. TERM is for this process only where no agent of a Slurm job says what it means: that may
    leave the run to a spare (launch/slurm/spare.py)."""
    if number != signal.SIGTERM or not orders().deaf_to_term:
        received.append(signal.Signals(number).name)


def take_up_request(controller: Controller, run_dir: Path, waiting: list[str]) -> None:
    """That of `laminar stop`, which no controller has had, if the roles that it was for still wait."""
    reason = left_request(run_dir, controller.store.store_id)
    if reason and controller.state.trainer_generation and waiting:
        controller.request_stop(reason)
        controller.turn()  # on record
    forget_request(run_dir)


def loop(controller: Controller, received: list[str], lock: RunLock, watch: Standstill) -> None:
    """Turns until the work is done, then until all have said goodbye. Bounded by the join and stop time
    limits. `received`: names of signals, filled by their handler."""
    state, members, cluster = controller.state, controller.members, controller.config.cluster
    wanted = {"trainer": controller.derived.trainer_ranks, "rollout": controller.active_replicas.minimum}
    if state.trainer_generation:  # a run that is under way goes on with the replicas that there are
        wanted = {"trainer": 0 if state.trainer_done else wanted["trainer"], "rollout": 1}
    joined, joining_until = False, time.monotonic() + cluster.join_timeout_seconds
    stop_until, stop_seconds, shown = None, 0.0, 0.0
    while not state.finished:
        lock.assure()
        controller.turn()
        watch.turned()
        if time.monotonic() - shown > _STATUS_SECONDS:
            shown = time.monotonic()
            status.write(Path(controller.config.run_dir), snapshot.status(controller))
            controller.hub.show_address()
        if received:
            controller.request_stop(received[0])
        if state.stopping and (members.at("trainer") or not state.trainer_generation):
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
            if missing["trainer"] > 0 and are_queued(Path(controller.config.run_dir)):
                joining_until = time.monotonic() + cluster.join_timeout_seconds
                continue
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


def close(controller: Controller | None, hub: Hub, run_dir: Path, replaced: bool) -> None:
    """Tells whoever is left to leave, and lets go of files and sockets; also after a failure. One that may
    have been `replaced`, or will be, says and writes nothing: the run is another's."""
    if controller is not None and replaced:
        controller.store.roll_back()
    elif controller is not None:
        controller.tell_all_to_leave(RUN_FAILED if not controller.state.finished else "done")
        controller.send_all()
    if controller is not None:
        closes = [controller.store.close, controller.metrics.close, controller.trace.close]
        if controller.archiving:
            closes.insert(0, controller.archiving.close)
        if controller.autoscaling:
            closes.append(partial(controller.autoscaling.close, replaced))
        for close_part in closes:
            try:
                close_part()
            except (OSError, sqlite3.Error):  # a full disk: the others are closed all the same
                log.exception("%s could not be done", close_part)
    hub.close()
    now = None if replaced else read_address(run_dir)
    if now is not None and now.run_id == hub.address.run_id:  # another's stays
        (run_dir / ADDRESS_FILE).unlink(missing_ok=True)
