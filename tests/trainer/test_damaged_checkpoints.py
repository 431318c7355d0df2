"""A damaged checkpoint is named and passed over for the one before; where none is whole, nothing is
touched."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.trainer.checkpointing import Trainer
from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.store.checkpoints import read_state, steps


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def without_hash(path: Path) -> None:
    state = json.loads(path.read_text())
    del state["state_hash"]
    path.write_text(json.dumps(state))


def listing(count: int) -> Callable[[Path], None]:
    """Leaves so many of the names in files.json."""

    def shorten(path: Path) -> None:
        path.write_text(json.dumps(dict(list(json.loads(path.read_text()).items())[:count])))

    return shorten


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("megatron/__0_0.distcp", flip, "megatron/__0_0.distcp has changed since it was written"),
    ("megatron/__0_0.distcp", cut, "megatron/__0_0.distcp has "),
    ("megatron/common.pt", Path.unlink, "megatron/common.pt is missing"),
    ("rng/00000.pt", flip, "rng/00000.pt has changed since it was written"),
    ("hf/model.safetensors", flip, "hf/model.safetensors has changed since it was written"),
    ("state.json", without_hash, "state.json has no state_hash"),
    ("state.json", cut, "state.json has "),
    ("state.json", flip, "state.json "),
    ("state.json", Path.unlink, "state.json is missing"),
    ("files.json", Path.unlink, "files.json is missing"),
    ("files.json", flip, "files.json has changed since it was signed"),
    ("files.json", cut, "files.json has changed since it was signed"),
    ("files.json", listing(2), "files.json has changed since it was signed"),
    ("signature.json", cut, "signature.json is no signature"),
    ("megatron/modelopt.pt", Path.touch, "megatron/modelopt.pt is not in files.json"),
]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tied_model: Path, tmp_path: Path, world: None
) -> None:
    """Whatever is damaged: one line names checkpoint and file and what is taken instead; the damaged one
    stays under another name, also when later checkpoints are pruned."""
    trainer = Trainer(tied_model, tmp_path, checkpoint__keep=2)
    trainer.train(0, 1)
    _, whole_hash = trainer.checkpointer.save(1)
    kept = set()
    for number, (name, harm, words) in enumerate(DAMAGES, 1):
        torch.rand(1)
        path, _ = trainer.checkpointer.save(2)
        harm(path / name)
        found = trainer.checkpointer.restore()
        assert found.step == 1 and trainer.checkpointer.state_hash() == whole_hash
        (line,) = found.passed_over
        assert f"checkpoint step_000002 is damaged ({words}" in line, (name, harm)
        kept.add(beside := ".damaged_step_000002" + (f".{number}" if number > 1 else ""))
        assert line.endswith(f"kept as {beside}; step_000001 is taken instead")
    for step in (2, 3, 4):
        trainer.checkpointer.save(step)
    assert steps(tmp_path) == [3, 4]
    assert {p.name for p in (tmp_path / "checkpoints").glob(".*")} == kept


def test_an_older_checkpoint_without_a_list_is_told_by_its_hash(
    tied_model: Path, tmp_path: Path, world: None
) -> None:
    """Checkpoints of versions that wrote no files.json are taken by who says checkpoint.unsigned=true, or
    passed over when their state is another or cannot be read."""
    trainer = Trainer(tied_model, tmp_path, checkpoint__unsigned=True)
    trainer.train(0, 1)

    def as_before(step: int, **changed: object) -> Path:
        path, _ = trainer.checkpointer.save(step)
        state = read_state(path)
        old = {k: v for k, v in state.items() if k not in ("files", "store_id", "restore_epoch", "gang")}
        (path / "state.json").write_text(json.dumps(old | changed))
        (path / "files.json").unlink()
        (path / "signature.json").unlink()
        return path

    as_before(1)
    assert trainer.checkpointer.restore() == (1, [])
    as_before(2, state_hash="0" * 64)
    found = trainer.checkpointer.restore()
    assert found.step == 1 and "its state hash is" in found.passed_over[0]
    cut(as_before(3) / "megatron" / "common.pt")
    found = trainer.checkpointer.restore()
    assert found.step == 1 and "it cannot be read" in found.passed_over[0]


def test_without_a_whole_checkpoint_nothing_is_touched(tied_model: Path, tmp_path: Path, world: None) -> None:
    """One refusal that names all of them and what is wrong: nobody begins anew by mistake."""
    trainer = Trainer(tied_model, tmp_path)
    for step in (1, 2):
        path, _ = trainer.checkpointer.save(step)
        flip(path / "rng" / "00000.pt")
    for _ in range(2):
        with pytest.raises(PermanentFailure, match=r"none of the 2 checkpoints in .*2: rng/.*1: rng/.*never"):
            trainer.checkpointer.restore()
    assert steps(tmp_path) == [1, 2]


def test_a_whole_checkpoint_that_does_not_fit_is_no_damaged_one(
    tied_model: Path, untied_model: Path, tmp_path: Path, world: None
) -> None:
    """Another model.path would put one good checkpoint after another aside: it is refused instead."""
    Trainer(tied_model, tmp_path).checkpointer.save(1)
    Trainer(tied_model, tmp_path).checkpointer.save(2)
    other = Trainer(untied_model, tmp_path)
    with pytest.raises(
        PermanentFailure, match=r"all files of .*step_000002 are as they were written, and it"
    ):
        other.checkpointer.restore()
    assert steps(tmp_path) == [1, 2]
