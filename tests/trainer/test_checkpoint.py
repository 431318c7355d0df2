"""Checkpoints: whole or not there at all, and a resumed run is the run that was never interrupted, bit for
bit."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny
import torch

from laminar_hpc.cluster.checkpoints import checkpoint_path, read_state, steps
from laminar_hpc.cluster.full_disk import NO_ROOM, full_disk_text
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner


class Trainer:
    """A policy with what belongs to it, as trainer/loop.py has them."""

    def __init__(self, model: Path, run_dir: Path, **settings: object) -> None:
        self.config = tiny.make_config(
            model,
            **{
                "algorithm__minibatches_per_step": 2,
                "optimizer__lr": 1e-3,
                "optimizer__weight_decay": 0.1,
                **settings,
            },
        )
        self.policy = MegatronPolicy(self.config)
        self.learner = Learner(self.config, self.policy)
        self.checkpointer = Checkpointer(run_dir, self.policy, self.learner)

    def train(self, first: int, last: int) -> list[dict[str, float]]:
        return [
            self.learner.train(tiny.make_batch(seed=100 + step), step, lambda: None)
            for step in range(first, last)
        ]


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


def test_a_checkpoint_before_the_first_update_can_be_resumed(
    tied_model: Path, tmp_path: Path, world: None
) -> None:
    """A run may be stopped before its first step; its optimizer has no moments yet."""
    fresh = Trainer(tied_model, tmp_path, trainer__distributed_optimizer=True)
    fresh.checkpointer.save(0)
    fresh.checkpointer.load(0)
    assert fresh.train(0, 1) == Trainer(tied_model, tmp_path, trainer__distributed_optimizer=True).train(0, 1)


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
        patch.setattr(
            trainer.policy, "save_hf", lambda directory: (_ for _ in ()).throw(OSError("disk full"))
        )
        with pytest.raises(OSError, match="disk full"):
            trainer.checkpointer.save(2)
    assert steps(tmp_path) == [1]
    hidden = [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
    assert hidden == [".step_000002"]
    for step in (2, 3, 3):
        trainer.checkpointer.save(step)
    assert steps(tmp_path) == [2, 3]
    newest = checkpoint_path(tmp_path, 3)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert sorted(p.name for p in newest.iterdir()) == ["hf", "megatron", "rng", "state.json"]
    assert read_state(newest) | {"state_hash": ""} == {
        "step": 3,
        "state_hash": "",
        "skipped_in_a_row": 0,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "distributed_optimizer": False,
    }


def test_damage_is_noticed_at_resume(tied_model: Path, tmp_path: Path, world: None) -> None:
    """Bits that rot, a checkpoint that is gone: one line that says what to do, and no training on wrong
    weights."""
    trainer = Trainer(tied_model, tmp_path)
    trainer.train(0, 1)
    path, _ = trainer.checkpointer.save(1)
    with pytest.raises(LaminarError, match=r"no complete checkpoint .*step_000007"):
        trainer.checkpointer.load(7)

    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"state_hash": "0" * 64}))
    with pytest.raises(LaminarError, match=r"step_000001 is damaged.*delete the folder"):
        trainer.checkpointer.load(1)
    (path / "state.json").write_text(json.dumps(state))

    (data,) = (path / "megatron").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(LaminarError, match=r"step_000001 is damaged.*delete the folder"):
        trainer.checkpointer.load(1)
    data.write_bytes(content[: len(content) // 3])
    with pytest.raises(LaminarError, match=r"step_000001 is damaged.*delete the folder"):
        trainer.checkpointer.load(1)


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
            shutil.rmtree(disk / "run" / "checkpoints" / ".step_000002", ignore_errors=True)
        assert len(seen) > 1, "only one kind of writer was tried"
        trainer.checkpointer.load(1)
        assert trainer.checkpointer.state_hash() == saved_hash
        trainer.checkpointer.save(2)
        assert steps(disk / "run") == [1, 2]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
