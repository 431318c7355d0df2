"""The run directory at start-up: what is complete, what is moved aside, whose the store is, and whether it is
sound."""

import json
import os
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from helpers import checkpoint_files
from laminar_hpc.config.errors import Refused
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.beginning import take_run_dir
from laminar_hpc.launch.supervisor import nothing_to_start
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.line.waiting import sign_of, who_waits
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.store import rundir
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.store.journal import Journal
from laminar_hpc.store.journal_files import segments
from laminar_hpc.store.recovery import identity, settle
from laminar_hpc.store.rundir import (
    cause_of_death,
    completed_step,
    journal_folder,
    note_restart,
    prepare,
    store_path,
    was_restarted,
)
from laminar_hpc.store.store import Store
from laminar_hpc.store.store_check import check_store

FILE = "heldout"  # the label of the demo's held-out file


def config_of(run_dir: Path, *words: str) -> RunConfig:
    return load_config(["experiment=demo", f"run_dir={run_dir}", "resume=auto", "steps=4", *words])


def lines(run_dir: Path, *records: dict) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records)


def start(restored: int = -1, **fields: object) -> dict:
    return {"kind": "start", "time": 1.0, "restored_step": restored, **fields}


def evaluated(step: int, name: str, label: str = "after") -> dict:
    return {"kind": "evaluation", "time": 2.0, "name": name, "file": FILE, "label": label, "step": step}


def test_a_run_directory_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    """Promise: one line that names it and the reason; a good one is left as it was, there or not."""
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file" / "run", Path("/proc/laminar/run")):
        with pytest.raises(Refused, match=f"run_dir={run_dir} cannot be used .*; choose another"):
            nothing_to_start(config_of(run_dir))
    assert not nothing_to_start(config_of(tmp_path / "a" / "run")) and not (tmp_path / "a").exists()


# ---- complete ----------------------------------------------------------------------------------------------


def test_a_run_directory_is_its_users_alone(tmp_path):
    """Promise (docs/security.md): under the usual umask other users of the machine enter neither the run's
    folder nor its store's, also when an earlier run was moved aside; a folder that was there keeps its
    mode."""
    before = os.umask(0o022)
    try:
        config = RunConfig(run_dir=str(tmp_path / "runs" / "mine"))
        prepare(config)
        (Path(config.run_dir) / "metrics.jsonl").touch()
        prepare(config)  # the earlier run is moved aside
        RunLock([tmp_path / "runs" / "first"], print).release()
        Store(tmp_path / "runs" / "store").close()
        modes = [folder.stat().st_mode & 0o777 for folder in (tmp_path / "runs").iterdir()]
        assert modes == [0o700] * 4
        Path(config.run_dir).chmod(0o750)
        config.resume = "auto"
        prepare(config)
        assert Path(config.run_dir).stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_complete_means_trained_and_evaluated(tmp_path):
    """Promise: a run is complete only with its last checkpoint and every evaluation of the last weights."""
    config = config_of(tmp_path)
    lines(tmp_path, start(), evaluated(0, "greedy", "before"), evaluated(0, "sampled", "before"))
    assert completed_step(config) is None, "no checkpoint"
    checkpoint_files.write(tmp_path, 4)
    assert completed_step(config) is None, "no evaluation after"
    lines(tmp_path, evaluated(4, "greedy"))
    assert completed_step(config) is None, "the sampled evaluation is missing"
    assert completed_step(config_of(tmp_path, "evaluation.samples=0")) == 4
    lines(tmp_path, evaluated(4, "sampled"))
    assert completed_step(config) == 4
    assert completed_step(config_of(tmp_path, "steps=5")) is None, "raised steps go on"
    assert completed_step(config_of(tmp_path, "resume=never")) is None, "resume=never begins anew"
    lines(tmp_path, start(restored=2))
    assert completed_step(config) is None, "the last steps are being done again"


@pytest.mark.parametrize("harm", ["a byte", "a file", "its list", "its state"])
def test_a_run_with_a_damaged_last_checkpoint_is_not_complete(tmp_path, harm):
    """Promise: trainers start and go on from the checkpoint before; an older one of all steps will do."""
    lines(tmp_path, start(), evaluated(4, "greedy"), evaluated(4, "sampled"))
    checkpoint_files.write(tmp_path, 2)
    path = checkpoint_files.write(tmp_path, 4)
    assert completed_step(config_of(tmp_path)) == 4
    if harm == "a byte":
        content = (path / "hf" / "model.safetensors").read_bytes()
        (path / "hf" / "model.safetensors").write_bytes(content[:9] + b"?" + content[10:])
    elif harm == "a file":
        (path / "hf" / "model.safetensors").unlink()
    else:
        (path / {"its list": "files.json", "its state": "state.json"}[harm]).write_text("{")
    assert completed_step(config_of(tmp_path)) is None
    lines(tmp_path, evaluated(2, "greedy"), evaluated(2, "sampled"))
    assert completed_step(config_of(tmp_path, "steps=2")) == 2


def test_a_replay_or_a_run_without_evaluation_is_complete_with_its_checkpoint(tmp_path):
    """Promise: what evaluates nothing waits for no evaluation."""
    lines(tmp_path, start())
    checkpoint_files.write(tmp_path, 4)
    assert completed_step(config_of(tmp_path, "evaluation.files=[]")) == 4
    assert completed_step(config_of(tmp_path, f"source=replay:{tmp_path}")) == 4


# ---- roles without a controller ----------------------------------------------------------------------------


@pytest.fixture
def roles(tmp_path):
    """A run whose controller is gone and one of whose roles has outlived it."""
    lines(tmp_path / "run", start())
    sign = sign_of(tmp_path / "run", Hello("relay", 3, "life", os.getpid(), ""))
    sign.show(0.0)
    yield tmp_path / "run", sign
    sign.take_away()


def test_a_run_of_which_roles_are_alive_is_not_moved_aside(roles):
    """Promise: a controller that begins anew there is refused, and names them with pid, machine and since
    when; not one byte is moved. With resume=auto it goes on; without the roles it begins anew."""
    run_dir, sign = roles
    with pytest.raises(
        Refused, match=rf"{run_dir} is in use by roles .*: relay 3 \(pid {os.getpid()} of "
    ) as e:
        prepare(config_of(run_dir, "resume=never"))
    assert "set resume=auto to go on with them" in str(e.value) and ", since 20" in str(e.value)
    assert [p.name for p in run_dir.parent.iterdir()] == ["run"]
    assert prepare(config_of(run_dir)).moved_to is None
    sign.take_away()
    assert prepare(config_of(run_dir, "resume=never")).moved_to == run_dir.with_name("run.1")


@pytest.mark.parametrize("age, alive", [(2.0, True), (3600.0, False)])
def test_roles_on_other_machines_are_told_by_their_renewal(roles, age, alive):
    """Promise: a sign of another machine counts while it is renewed; one that is not is left behind."""
    run_dir, _ = roles
    path = run_dir / "waiting" / "relay_3.life"
    owner = json.loads(path.read_bytes())
    stale_after = 600.0 if alive else 0.4
    path.write_text(json.dumps(owner | {"host": "another-machine", "stale_after": stale_after}))
    os.utime(path, (time.time() - age,) * 2)
    assert bool(who_waits(run_dir)) == alive == path.exists()


def test_roles_that_have_not_yet_seen_their_controller_s_death_are_awaited(roles, monkeypatch):
    """Promise: where a controller has died without a word, its roles get the time to show themselves; not in
    one torchrun, whose ranks end with it."""
    run_dir, sign = roles
    sign.take_away()
    (run_dir / "controller.json").write_text("of the dead one")
    (run_dir / "config.yaml").write_text("role: controller")
    late = threading.Timer(0.5, sign.show, (0.0,))
    late.start()
    with pytest.raises(Refused, match="relay 3"):
        prepare(config_of(run_dir, "resume=never"))
    late.join()
    sign.take_away()
    (run_dir / "config.yaml").write_text("role: all")
    begun = time.monotonic()
    assert prepare(config_of(run_dir, "resume=never")).moved_to and time.monotonic() - begun < 2


# ---- torchrun's own restarts -------------------------------------------------------------------------------


def test_a_run_that_torchrun_restarts_goes_on(tmp_path, monkeypatch):
    """Promise: --max-restarts resumes what this torchrun began, on nodes where nothing failed as well, and
    never what an earlier job left in the folder."""
    config = config_of(tmp_path, "resume=never")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    lines(tmp_path, start(torchrun="job6 elsewhere 1"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not was_restarted(config), "another job's run"
    lines(tmp_path, start(torchrun="job7 another-node 1"))
    assert was_restarted(config)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not was_restarted(config)
    lines(tmp_path, start(torchrun=rundir.torchrun_identity()))
    assert was_restarted(config), "the same torchrun, whose own count is still 0"


def test_the_cause_of_a_death_is_what_the_controller_could_say(tmp_path):
    """Promise: the line of a restart by torchrun names the cause if there was time to write it down."""
    lines(tmp_path, start(), {"kind": "end", "time": 2.0, "reason": "failed: relay 0 has died"})
    assert cause_of_death(tmp_path) == "relay 0 has died"
    lines(tmp_path, start())
    assert "controller died" in cause_of_death(tmp_path)
    checkpoint_files.write(tmp_path, 2)
    assert note_restart(config_of(tmp_path), "x", 3) == 2
    kept = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"kind": "restart", "cause": "x", "step": 3, "restored_step": 2}.items() <= kept.items()


# ---- moved aside -------------------------------------------------------------------------------------------


def test_an_earlier_run_and_its_store_elsewhere_are_moved_aside_whole(tmp_path):
    """Promise: nothing is overwritten: the write-ahead log goes with its store, and a number is used once for
    both."""
    config = config_of(tmp_path / "run", "resume=never", f"store_dir={tmp_path}/stores")
    folder = tmp_path / "stores" / "run"
    folder.mkdir(parents=True)  # as its lock does
    prepare(config)
    lines(tmp_path / "run", start())
    for name in ("store.sqlite", "store.sqlite-wal"):
        (folder / name).write_text(name)
    (folder / "store.1.sqlite").write_text("of an earlier run whose folder was deleted")
    moved = prepare(config).moved_to
    assert moved == tmp_path / "run.2" and (moved / "metrics.jsonl").exists()
    assert (folder / "store.2.sqlite").read_text() == "store.sqlite"
    assert (folder / "store.2.sqlite-wal").read_text() == "store.sqlite-wal"
    assert (folder / "store.1.sqlite").exists() and not (folder / "store.sqlite").exists()


def written(config: RunConfig) -> str:
    """As a controller leaves store and journal of `config`; the store's id."""
    folder, path = journal_folder(config), store_path(config)
    settle(folder, path, print)
    store = Store(path.parent, journal=Journal(folder, path, print))
    store.close()
    return store.store_id


def test_runs_of_the_same_name_do_not_share_a_store(tmp_path):
    """Promise: with one store_dir, the run b/demo cannot take the store of the run a/demo, as long as it is
    fresh and when it has a journal of its own; a/demo may be renamed."""
    mine = config_of(tmp_path / "a" / "demo", f"store_dir={tmp_path}/stores")
    other = config_of(tmp_path / "b" / "demo", f"store_dir={tmp_path}/stores")
    prepare(mine)
    ids = [written(mine)]
    prepare(mine)
    with pytest.raises(
        Refused, match=rf"is the store of {tmp_path}/a/demo \(store id {ids[0]}\): set another"
    ):
        prepare(other)
    elsewhere = config_of(tmp_path / "b" / "demo", f"store_dir={tmp_path}/other_stores")
    prepare(elsewhere)
    ids.append(written(elsewhere))
    with pytest.raises(Refused, match="they belong to different runs") as refused:
        prepare(other)
    assert all(store_id in str(refused.value) for store_id in ids)
    (tmp_path / "c").mkdir()
    (tmp_path / "a" / "demo").rename(tmp_path / "c" / "demo")
    moved = config_of(tmp_path / "c" / "demo", f"store_dir={tmp_path}/stores")
    prepare(moved)
    assert written(moved) == ids[0]


def test_what_a_deleted_run_has_left_in_store_dir_is_moved_aside(tmp_path):
    """Promise: a run that begins again in the folder of a deleted one does not go on with its store; a store
    in the run directory is not left behind by setting store_dir."""
    config = config_of(tmp_path / "run", f"store_dir={tmp_path}/stores")
    prepare(config)
    earlier = written(config)
    shutil.rmtree(tmp_path / "run")
    prepare(config)
    assert written(config) != earlier and (tmp_path / "stores" / "run" / "store.1.sqlite").exists()
    (tmp_path / "run" / "store.sqlite").write_text("x")
    with pytest.raises(Refused, match=f"move it to {tmp_path}/stores/run/store.sqlite"):
        prepare(config)


def test_the_controller_rebuilds_a_store_that_is_missing_or_damaged(tmp_path):
    """Promise: with a journal neither the launcher nor the controller refuses it, and the same command goes
    on; resume=never takes journal and store aside."""
    config = config_of(tmp_path / "run", f"store_dir={tmp_path}/stores")
    prepare(config)
    store_id, path, said = written(config), store_path(config), list[str]()
    lines(tmp_path / "run", start())
    for content in (None, b"no database" * 1000, path.read_bytes()[:5000]):
        path.unlink() if content is None else path.write_bytes(content)
        assert not nothing_to_start(config)
        lock = RunLock([tmp_path / "run", path.parent], said.append)
        take_run_dir(config, lock, said.append)
        lock.release()
        assert written(config) == store_id and f"{path} was rebuilt from" in said[-1]
    never = config_of(tmp_path / "run", f"store_dir={tmp_path}/stores", "resume=never")
    lock = RunLock([tmp_path / "run", path.parent], said.append)
    moved = take_run_dir(never, lock, said.append)[0].moved_to
    lock.release()
    assert moved and segments(moved / "journal") and not segments(tmp_path / "run" / "journal")
    assert written(never) != store_id


# ---- the store ---------------------------------------------------------------------------------------------


def make_store(folder: Path, steps: int) -> Path:
    """A store of so many steps of a group each."""
    store = Store(folder)
    for step in range(steps):
        store.rows.add_group(step, 0, step, step, step + 1, 0.0)
        store.rows.add_trajectories(range(50 * step, 50 * step + 50), step, 0, 0, step, step)
        store.rows.consume([step], step)
    store.close()
    return folder / "store.sqlite"


def refused(path: Path, restored: int, replay: bool = False) -> str:
    """The text of the refusal, "" if there is none; fails when anything in the folder changes."""
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}
    try:
        check_store(path, path.parent, restored, replay, 60.0)
        return ""
    except Refused as error:
        return str(error)
    finally:
        assert before == {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}, (
            "nothing is changed"
        )


def test_a_sound_store_passes(tmp_path):
    """Promise: a whole store goes with any checkpoint that is not newer; a fresh run needs none."""
    path = make_store(tmp_path, 4)
    assert refused(path, 4) == refused(path, 2) == refused(path, -1) == ""
    path.unlink()
    assert refused(path, -1) == refused(path, 4, replay=True) == ""


@pytest.mark.parametrize("damage", ["no database", "cut off", "a page overwritten", "emptied", "missing"])
def test_a_damaged_store_is_refused_with_the_choices(tmp_path, damage):
    """Promise: one line names the file, what is wrong, and how to go on; nothing is overwritten."""
    path = make_store(tmp_path, 4)
    content = path.read_bytes()
    assert len(content) > 5 * 4096
    if damage == "no database":
        path.write_bytes(b"x" * len(content))
    elif damage == "cut off":
        os.truncate(path, len(content) // 2)
    elif damage == "a page overwritten":
        path.write_bytes(content[:8192] + b"\x07" * 8192 + content[16384:])
    elif damage == "emptied":
        os.truncate(path, 0)
    else:
        path.unlink()
    text = refused(path, 4)
    assert text.startswith(f"{path} is ") and "restore it from a copy" in text and "\n" not in text
    assert f"model.path={tmp_path}/checkpoints/step_000004/hf run_dir=ANOTHER" in text
    if damage not in ("emptied", "missing"):
        assert "move it away and start again" in refused(path, -1), "without a checkpoint that is the cure"


def test_a_store_older_than_the_checkpoint_is_refused(tmp_path):
    """Promise: an old copy would train trajectories twice, so it is not gone on with."""
    assert "older than the newest checkpoint (it ends at step 4)" in refused(make_store(tmp_path, 4), 6)


def test_a_damaged_store_in_store_dir_that_has_no_journal_is_refused(tmp_path):
    """Promise: it is not taken for a missing one, and nothing is changed."""
    config = config_of(tmp_path / "run", f"store_dir={tmp_path}/stores")
    path = make_store(tmp_path / "stores" / "run", 4)
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"\x07" * 8192 + content[16384:])
    lines(tmp_path / "run", start())
    lock = RunLock([tmp_path / "run", path.parent], print)
    with pytest.raises(Refused, match=f"{path} is damaged"):
        take_run_dir(config, lock, print)
    lock.release()
    assert not journal_folder(config).exists() and path.read_bytes()[:8192] == content[:8192]


def test_a_checkpoint_of_another_store_is_refused(tmp_path):
    """Promise: both ids are named; a checkpoint that names no store is taken as it is."""
    path = make_store(tmp_path, 4)
    checkpoint_files.write(tmp_path, 4)
    state = checkpoint_path(tmp_path, 4) / "state.json"
    store_id = identity(path).store_id
    for wanted, text in (
        ({}, ""),
        ({"store_id": "feed"}, f"is the store {store_id}, and"),
        ({"store_id": store_id}, ""),
    ):
        state.write_text(json.dumps(wanted))
        assert text in refused(path, 4) and bool(refused(path, 4)) == bool(text)
    state.write_text(json.dumps({"store_id": "feed"}))
    assert "belongs to the store feed" in refused(path, 4) and refused(path, 4, replay=True) == ""


def test_a_replay_reads_the_store_of_a_live_run_without_touching_it(tmp_path):
    """Promise: source=replay of a run that is going on neither waits for its store nor locks it."""
    live = Store(tmp_path)
    live.rows.add_group(0, 0, 0, 0, 1, 0.0)
    live.rows.consume([0], 0)
    live.commit()
    replay = Store(tmp_path, read_only=True)
    assert replay.rows.consumed_groups(0) == [0] and replay.rows.batch([0]) == []
    live.put("x", 1)
    live.commit()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        replay.put("x", 2)
    live.close()
