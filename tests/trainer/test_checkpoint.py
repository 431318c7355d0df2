"""Checkpoints: whole or not there at all, and a resumed run is the run that was never interrupted, bit for
bit."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers.paths import HELPERS, environment
from helpers.trainer.checkpointing import Trainer
from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.machine.files.durable import sync_folder
from laminar_hpc.store.checkpoints import checkpoint_path, fence, read_state, reading, steps
from laminar_hpc.store.full_disk import NO_ROOM, full_disk_text
from laminar_hpc.trainer.checkpointing.hf_files import HfFiles


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"trainer__distributed_optimizer": True},
        {"model__dtype": "bfloat16"},
        {"model__dtype": "bfloat16", "trainer__distributed_optimizer": True},
    ],
    ids=["float32", "float32-distributed", "bfloat16", "bfloat16-distributed"],
)
def test_resume_is_bit_exact(settings: dict, tied_model: Path, tmp_path: Path, world: None) -> None:
    """2 + 2 steps with a restart between equal 4 straight steps: metrics, weights, optimizer, schedule and
    random states (state hash)."""
    settings = {"optimizer__warmup_steps": 3, **settings}
    straight = Trainer(tied_model, tmp_path / "straight", **settings)
    metrics = straight.train(0, 4)

    before = Trainer(tied_model, tmp_path / "run", **settings)
    before.train(0, 2)
    _, saved_hash = before.checkpointer.save(2)
    after = Trainer(tied_model, tmp_path / "run", **settings)
    assert after.checkpointer.state_hash() != saved_hash
    after.checkpointer.load(2)
    restored = read_state(checkpoint_path(tmp_path / "run", 2))
    assert after.checkpointer.state_hash() == saved_hash == restored["state_hash"]
    assert after.train(2, 4) == metrics[2:]
    assert after.checkpointer.state_hash() == straight.checkpointer.state_hash()
    mine, theirs = dict(after.policy.canonical_tensors()), dict(straight.policy.canonical_tensors())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_resume_goes_on_with_its_own_settings(
    distributed: bool, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """Promise: learning rate, weight decay, betas and epsilon are those of the command line that resumes, not
    of the one that saved: who is told to lower optimizer.lr and to go on trains with the lower one."""
    settings = {"trainer__distributed_optimizer": distributed, "optimizer__weight_decay": 0.1}
    before = Trainer(tied_model, tmp_path, **settings)
    before.train(0, 2)
    before.checkpointer.save(2)
    settings |= {"optimizer__lr": 1e-5, "optimizer__beta1": 0.8, "optimizer__eps": 1e-7}
    settings["optimizer__weight_decay"] = 0.0
    after = Trainer(tied_model, tmp_path, **settings)
    after.checkpointer.load(2)
    assert [step["learning_rate"] for step in after.train(2, 4)] == [1e-5, 1e-5]
    for group in after.policy.optimizer.param_groups:
        assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.0, (0.8, 0.95), 1e-7)


def test_the_reference_model_is_the_initial_one_also_after_a_resume(
    tied_model: Path, tmp_path: Path, world: None
) -> None:
    """No checkpoint holds it: it is that of model.path. A resume that took the restored weights would start
    with a KL of 0."""
    settings = {"algorithm__kl_coefficient": 0.1, "algorithm__proximal": "recomputed", "optimizer__lr": 5e-3}
    straight = Trainer(tied_model, tmp_path / "straight", **settings)
    metrics = straight.train(0, 3)
    before = Trainer(tied_model, tmp_path / "run", **settings)
    before.train(0, 2)
    before.checkpointer.save(2)
    after = Trainer(tied_model, tmp_path / "run", **settings)
    after.checkpointer.load(2)
    assert after.train(2, 3) == metrics[2:] and metrics[2]["kl"] > 1e-3
    assert after.checkpointer.state_hash() == straight.checkpointer.state_hash()


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", False), ("bfloat16", False), ("float32", True)]
)
def test_a_checkpoint_before_the_first_update_can_be_resumed(
    dtype: str, distributed: bool, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """A run may be stopped before its first step; its optimizer has no moments yet."""
    settings = {"model__dtype": dtype, "trainer__distributed_optimizer": distributed}
    fresh = Trainer(tied_model, tmp_path, **settings)
    fresh.checkpointer.save(0)
    assert fresh.checkpointer.restore().step == 0
    assert fresh.train(0, 1) == Trainer(tied_model, tmp_path, **settings).train(0, 1)


def test_hash_tells_what_resume_must_restore(tied_model: Path, tmp_path: Path, world: None) -> None:
    """A moment, a count of steps, a random stream: each changes the hash, so an equal hash means an equal
    state."""
    trainer = Trainer(tied_model, tmp_path)
    trainer.train(0, 1)
    state, hashes = trainer.policy.optimizer.optimizer.state, {trainer.checkpointer.state_hash()}
    state[next(iter(state))]["exp_avg"].view(-1)[0] += 1e-6
    hashes.add(trainer.checkpointer.state_hash())
    state[next(iter(state))]["step"] += 1
    hashes.add(trainer.checkpointer.state_hash())
    torch.rand(1)
    hashes.add(trainer.checkpointer.state_hash())
    trainer.policy.scheduler.num_steps += 1
    hashes.add(trainer.checkpointer.state_hash())
    assert len(hashes) == 5


def test_a_half_written_checkpoint_is_never_seen(
    tied_model: Path, tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever interrupts the writer, the newest complete one stays the newest, and the next save clears the
    rest away."""
    trainer = Trainer(tied_model, tmp_path, checkpoint__keep=2)
    assert steps(tmp_path) == []
    trainer.checkpointer.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(HfFiles, "write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            trainer.checkpointer.save(2)
    assert steps(tmp_path) == [1]
    hidden = [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
    assert hidden == [".step_000002.0"]
    for step in (2, 3, 3):
        trainer.checkpointer.save(step)
    assert steps(tmp_path) == [2, 3]
    newest = checkpoint_path(tmp_path, 3)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert sorted(p.name for p in newest.iterdir()) == [
        "files.json",
        "hf",
        "megatron",
        "rng",
        "signature.json",
        "state.json",
    ]
    listed = json.loads((newest / "files.json").read_text())
    there = {str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()}
    assert there == {*listed, "files.json", "signature.json"} and any(
        name.endswith(".distcp") for name in listed
    )
    assert read_state(newest) | {"state_hash": ""} == {
        "files": len(listed) - 1,
        "store_id": "",
        "restore_epoch": 0,
        "gang": 0,
        "step": 3,
        "state_hash": "",
        "skipped_in_a_row": 0,
        "tensor_parallel": 1,
        "context_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_stages": 1,
        "data_parallel": 1,
        "expert_parallel": 1,
        "distributed_optimizer": False,
        "kl_coefficient": 0.0,
        "reference": False,
        "critic": False,
    }


def test_a_run_without_checkpoints_starts_on_its_model(tied_model: Path, tmp_path: Path, world: None) -> None:
    """So a fresh run goes the same way as a resumed one."""
    assert Trainer(tied_model, tmp_path).checkpointer.restore() == (None, [])


def test_a_checkpoint_of_another_store_is_refused(tied_model: Path, tmp_path: Path, world: None) -> None:
    """Both ids are named, and what to do; the same store's, and those of versions without ids, are taken."""
    trainer = Trainer(tied_model, tmp_path, welcome=Welcome("run", store_id="aaaa"))
    trainer.train(0, 1)
    trainer.checkpointer.save(1)
    assert trainer.checkpointer.restore().step == 1
    assert Trainer(tied_model, tmp_path).checkpointer.restore().step == 1
    other = Trainer(tied_model, tmp_path, welcome=Welcome("run", store_id="bbbb"))
    with pytest.raises(
        PermanentFailure, match=r"step_000001 belongs to store aaaa, the run has store bbbb: "
    ):
        other.checkpointer.restore()


def test_which_checkpoints_stay(tied_model: Path, tmp_path: Path, world: None) -> None:
    """The newest N and every Mth; what is being read stays until the next time; one whose name was lost
    between two renames gets it back."""
    trainer = Trainer(tied_model, tmp_path, checkpoint__keep=2, checkpoint__keep_every=3)
    trainer.train(0, 1)
    for step in range(1, 6):
        trainer.checkpointer.save(step)
    assert steps(tmp_path) == [3, 4, 5]
    with reading(checkpoint_path(tmp_path, 4)):
        trainer.checkpointer.save(6)
        trainer.checkpointer.save(7)
        assert steps(tmp_path) == [3, 4, 6, 7]
    trainer.checkpointer.save(8)
    assert steps(tmp_path) == [3, 6, 7, 8]
    newest = checkpoint_path(tmp_path, 8)
    newest.rename(newest.with_name(".old_step_000008"))
    assert trainer.checkpointer.restore().step == 8


def test_a_replaced_gang_writes_no_checkpoint(tied_model: Path, tmp_path: Path, world: None) -> None:
    """Trainers that were stopped while another trainer generation took their place: what they still write
    gets no name."""
    old = Trainer(tied_model, tmp_path, welcome=Welcome("run", trainer_generation=1))
    fence(tmp_path, 1)
    old.checkpointer.save(1)
    fence(tmp_path, 2)
    with pytest.raises(PermanentFailure, match="trainer generation 1 was replaced by 2 while it wrote"):
        old.checkpointer.save(2)
    assert steps(tmp_path) == [1]
    Trainer(tied_model, tmp_path, welcome=Welcome("run", trainer_generation=2)).checkpointer.save(2)
    assert steps(tmp_path) == [1, 2] and read_state(checkpoint_path(tmp_path, 2))["gang"] == 2


@pytest.mark.slow
def test_a_gang_that_was_stopped_in_a_checkpoint_wakes_up_replaced(tied_model: Path, tmp_path: Path) -> None:
    """A real process, stopped while it writes, and let go on when another trainer generation may write:
    nothing that it wrote gets a name, and it ends by itself."""
    run_dir = tmp_path / "run"
    fence(run_dir, 1)
    many = [str(step) for step in range(1, 1000)]
    command = [sys.executable, HELPERS / "trainer/save_checkpoint.py", tied_model, run_dir, "1", *many]
    zombie = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        deadline = time.monotonic() + 60
        while not (steps(run_dir) and list((run_dir / "checkpoints").glob(".step_*/rng/*"))):
            assert zombie.poll() is None and time.monotonic() < deadline
        zombie.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, zombie.pid, os.WSTOPPED)
        fence(run_dir, 2)
        before = steps(run_dir)
        zombie.send_signal(signal.SIGCONT)
        _, error = zombie.communicate(timeout=30)
    finally:
        zombie.kill()
    assert zombie.returncode and "trainer generation 1 was replaced by 2 while it wrote" in error
    assert steps(run_dir) == before


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_all_is_on_the_disk_before_the_checkpoint_has_its_name(tied_model: Path, tmp_path: Path) -> None:
    """The system calls of a real save: every file and folder of it is synced before the rename, and the
    folder above after it."""
    run_dir, calls = tmp_path / "run", tmp_path / "calls"
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-s",
        "300",
        "-e",
        "trace=fsync,fdatasync,rename,renameat,renameat2",
    ]
    save = [sys.executable, HELPERS / "trainer/save_checkpoint.py", tied_model, run_dir, "0", "1"]
    subprocess.run([*command, "-o", calls, *save], check=True, timeout=200, env=environment())
    path = checkpoint_path(run_dir, 1)
    lines = calls.read_text().splitlines()
    renamed = next(i for i, line in enumerate(lines) if "rename" in line and f'"{path}"' in line)

    def synced(lines: list[str]) -> set[str]:
        return {match[1] for line in lines if (match := re.search(r"f(?:data)?sync\(\d+<([^>]*)>", line))}

    hidden = path.with_name(f".{path.name}.0")
    written = {str(hidden / each.relative_to(path)) for each in path.rglob("*")} | {str(hidden)}
    assert any(name.endswith(".metadata") for name in written) and len(written) > 10
    assert written <= synced(lines[:renamed])
    assert str(path.parent) in synced(lines[renamed:])


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems refuse it; a disk that fails is an error all the same."""

    def refuse(_: int) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    code = errno.EINVAL
    sync_folder(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="refused"):
        sync_folder(tmp_path)


def test_saving_starts_no_process(tied_model: Path, tmp_path: Path, world: None) -> None:
    """Megatron's own writer starts a manager and forks, which can hang in a process with threads; ours does
    not."""
    import psutil

    trainer = Trainer(tied_model, tmp_path)
    children = {p.pid for p in psutil.Process().children(recursive=True)}
    trainer.checkpointer.save(1)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= children


@pytest.mark.skipif(os.getuid() != 0, reason="a small disk is mounted, which takes root")
def test_a_disk_that_fills_up_in_a_checkpoint(tied_model: Path, tmp_path: Path, world: None) -> None:
    """Promise: whichever of its files no longer fits, the error is known to be a full disk, the checkpoint
    before is whole, and with room the next one succeeds."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], check=True)
    try:
        trainer = Trainer(tied_model, disk / "run")
        trainer.config.run_dir = str(disk / "run")
        trainer.train(0, 1)
        path, saved_hash = trainer.checkpointer.save(1)
        needed = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        seen = set()
        for share in (0.0, 0.3, 0.6, 0.72, 0.8, 0.9, 0.97, 0.99):
            (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - int(share * needed)))
            with pytest.raises(BaseException) as raised:  # torch's CheckpointException is no Exception
                trainer.checkpointer.save(2)
            seen.add(type(raised.value).__name__)
            text = full_disk_text(raised.value, trainer.config)
            assert text.startswith(f"{NO_ROOM} run_dir={disk}/run"), raised.value
            assert steps(disk / "run") == [1]
            (disk / "filler").unlink()
            shutil.rmtree(disk / "run" / "checkpoints" / ".step_000002.0", ignore_errors=True)
        assert len(seen) > 1, "only one kind of writer was tried"
        trainer.checkpointer.load(1)
        assert trainer.checkpointer.state_hash() == saved_hash
        trainer.checkpointer.save(2)
        assert steps(disk / "run") == [1, 2]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
