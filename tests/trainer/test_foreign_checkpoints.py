"""A checkpoint is loaded only if the run's key has signed it: whoever else has written it, or changed it,
gets nothing unpickled."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from helpers.trainer.checkpointing import Trainer
from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.machine.files import durable
from laminar_hpc.store import signatures
from laminar_hpc.store.checkpoints import steps

FOREIGN = {
    "a pickle in place of the metadata": r"megatron/\.metadata has ",
    "and the list made anew": r"files\.json has changed since it was signed",
    "and signed with another key": r"REFUSED.*000002 is signed with another key than .*checkpoint\.key: name",
    "and the signature taken away": r"REFUSED.*000002 is not signed: name the key",
}


class Mark:
    """Unpickled it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._folder),)


def forge(path: Path, kind: str, mark: Path) -> None:
    """Changes the checkpoint as somebody would who can write there and has not the key."""
    metadata = path / "megatron" / ".metadata"
    metadata.write_bytes(pickle.dumps(Mark(mark)))
    if kind == "a pickle in place of the metadata":
        return
    listed = json.loads((path / "files.json").read_bytes())
    listed["megatron/.metadata"] = durable.seal(metadata)
    files = json.dumps(listed).encode()
    (path / "files.json").write_bytes(files)
    if "another key" in kind:
        (path / "signature.json").write_bytes(signatures.SigningKey(b"x" * 64).sign(files))
    elif "taken away" in kind:
        (path / "signature.json").unlink()


@pytest.mark.parametrize("kind", FOREIGN)
def test_nothing_of_a_foreign_checkpoint_is_unpickled(
    kind: str, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """Damage is passed over, what nobody or somebody else has signed is refused; the pickle never runs, but
    for who says so."""
    trainer, mark = Trainer(tied_model, tmp_path), tmp_path / "unpickled"
    trainer.checkpointer.save(1)
    path, _ = trainer.checkpointer.save(2)
    forge(path, kind, mark)
    if FOREIGN[kind].startswith("REFUSED"):
        with pytest.raises(PermanentFailure, match=FOREIGN[kind].removeprefix("REFUSED")) as refused:
            trainer.checkpointer.restore()
        assert "checkpoint.unsigned=true" in str(refused.value) and steps(tmp_path) == [1, 2]
        assert not mark.exists()
        trainer.config.checkpoint.unsigned = True
        with pytest.raises(PermanentFailure):  # what was unpickled is no metadata
            trainer.checkpointer.restore()
        assert mark.exists(), "the pickle would have run"
    else:
        found = trainer.checkpointer.restore()
        assert found.step == 1 and re.search(FOREIGN[kind], found.passed_over[0])
        assert not mark.exists()


def test_a_run_goes_on_elsewhere_with_its_key(tied_model: Path, tmp_path: Path, world: None) -> None:
    """A folder that is copied whole simply goes on. Without its key it is refused, goes on with the key
    that the user names, and signs with that."""
    first, second = tmp_path / "first", tmp_path / "second"
    Trainer(tied_model, first).checkpointer.save(1)
    shutil.copytree(first, second)
    assert Trainer(tied_model, second).checkpointer.restore().step == 1
    kept = (second / "checkpoint.key").rename(tmp_path / "kept")
    with pytest.raises(PermanentFailure, match=r"is signed, and its key .*second/checkpoint\.key is missing"):
        Trainer(tied_model, second).checkpointer.restore()
    named = Trainer(tied_model, second, checkpoint__key=str(kept))
    assert named.checkpointer.restore().step == 1
    named.checkpointer.save(2)
    assert not (second / "checkpoint.key").exists()
    assert Trainer(tied_model, second, checkpoint__key=str(kept)).checkpointer.restore().step == 2


def test_a_lost_key_is_made_anew_by_who_says_so(tied_model: Path, tmp_path: Path, world: None) -> None:
    """checkpoint.unsigned=true goes on, and the next checkpoint is signed again."""
    Trainer(tied_model, tmp_path).checkpointer.save(1)
    (tmp_path / "checkpoint.key").unlink()
    brave = Trainer(tied_model, tmp_path, checkpoint__unsigned=True)
    assert brave.checkpointer.restore().step == 1
    brave.checkpointer.save(2)
    assert Trainer(tied_model, tmp_path).checkpointer.restore().step == 2
