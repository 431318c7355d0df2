"""What a controller does before it lets anybody in: checks, the lock of the run directory, the store that an
earlier one has left."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.check import Derived, check, check_machine, derived_values, warnings
from laminar_hpc.config.errors import Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.address import read_address
from laminar_hpc.line.agent_line import RankReport, orders, report
from laminar_hpc.line.waiting import Sign
from laminar_hpc.machine.files.open_files import allow_connections
from laminar_hpc.machine.locks.lock_owner import Watched
from laminar_hpc.machine.locks.run_lock import RunLock, refuse_if_held
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.observability.prometheus import check_prometheus
from laminar_hpc.machine.observability.wandb_mirror import check_wandb
from laminar_hpc.store.recovery import own_era, retire, settle
from laminar_hpc.store.rundir import Start, journal_folder, prepare, store_directory, store_path, unusable
from laminar_hpc.store.same_run import refuse_changes, refuse_unsound_source
from laminar_hpc.store.store_check import check_store, damage_of
from laminar_hpc.store.turn import ONE_WORLD_SECONDS, await_turn

_STORE_CHECK_SECONDS = 60.0


@dataclass(frozen=True)
class Begun:
    """What a controller has before it lets anybody in. `era`: its own in the journal; 0 without one.
    `under_way`: others of the run may have outlived an earlier controller."""

    derived: Derived
    start: Start
    lock: RunLock
    era: int
    under_way: bool = False


def start_up(config: RunConfig, say: Callable[[str], None]) -> Begun:
    """Checks everything that can be checked without the others, then takes the run directory and its lock."""
    run_dir, watched = Path(config.run_dir), _await_turn(config, say)
    refuse_if_held(run_dir, watched)
    derived = check(config)
    check_machine(config, derived)
    refuse_changes(config)
    refuse_unsound_source(config)
    members = derived.trainer_ranks + derived.rollout_ranks * (1 + derived.relay_ranks_per_machine)
    allow_connections(members, meshes=False)
    check_wandb(config.observability.wandb)
    under_way = config.role != "all" and config.resume == "auto" and read_address(run_dir) is not None
    if not under_way:
        check_prometheus(config)
    for text in [] if under_way else console.derived_block(derived_values(config, derived)):
        say(text)  # else the controller that has died has said it
    for text in warnings(config, derived):
        say(console.line("warning", text))
    try:
        folders = [run_dir, store_directory(config)]
        lock = RunLock(folders, lambda text: say(console.line("set-up", text)), watched=watched)
    except OSError as error:
        raise unusable(run_dir, error) from error
    except Refused:
        if orders().spare and config.role == "controller":  # another one has begun at the same moment
            return start_up(config, say)
        raise
    report(RankReport(joined_as="controller 0"))
    try:
        return Begun(derived, *take_run_dir(config, lock, say), under_way)
    except BaseException:
        lock.release()
        raise


def _await_turn(config: RunConfig, say: Callable[[str], None]) -> Watched:
    """Returns at once where another controller refuses this one."""
    if not (spare := orders().spare):
        return Watched()
    run_dir = Path(config.run_dir)
    if config.role == "all":
        return await_turn(run_dir, say, None, ONE_WORLD_SECONDS)
    return await_turn(run_dir, say, Sign(Path(spare)))


def take_run_dir(config: RunConfig, lock: RunLock, say: Callable[[str], None]) -> tuple[Start, RunLock, int]:
    """A fresh run directory, or the earlier run's, of which the store is known to be sound; its lock; and
    the era of this controller."""
    start = prepare(config, lock)
    if start.moved_to:
        text = f"an earlier run was moved to {start.moved_to} (resume=auto goes on with it instead)"
        say(console.line("set-up", text))
    store, journal, replay = store_path(config), journal_folder(config), config.source != "rollout"
    seconds, era = _STORE_CHECK_SECONDS, 0
    if journal.is_dir() or config.store_dir:
        damage = damage_of(store, seconds)
        if config.store_dir and (journal.is_dir() or not damage):
            era = own_era(journal, store)
            lock.assure()  # whoever takes it later gets a later era
            settle(journal, store, say, damage, era)
        elif not config.store_dir:
            retire(journal, store, say, damage)
        seconds = seconds if damage else 0.0  # all of it was read just now
    check_store(store, Path(config.run_dir), start.restored_step or 0, replay, seconds)
    return start, lock, era
