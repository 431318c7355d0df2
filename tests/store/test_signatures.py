"""The key of checkpoints: where it lies, who may read it, and what a command line refuses."""

import os
from pathlib import Path

import pytest

from helpers import checkpoint_files
from laminar_hpc.config.errors import Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.supervisor import nothing_to_start
from laminar_hpc.store.signatures import SigningKey, objection, own_key, read_key


def config_of(run_dir: Path, **checkpoint: object) -> RunConfig:
    """Of a replay, which needs no store."""
    config = RunConfig(run_dir=str(run_dir), resume="auto", source=f"replay:{run_dir}", steps=9)
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    return config


def test_the_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask, the same at the second call; nothing is left beside it."""
    before = os.umask(0)
    try:
        first = own_key(RunConfig(), tmp_path)
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.name == "checkpoint.key" and path.stat().st_mode & 0o777 == 0o600
    assert own_key(RunConfig(), tmp_path).name == first.name
    assert first.name not in path.read_text() and path.read_text().strip() not in first.sign(b"").decode()


def test_keys_that_others_know_are_refused(tmp_path: Path) -> None:
    """One line each, which says how to mend it."""
    own_key(RunConfig(), tmp_path)
    path = tmp_path / "checkpoint.key"
    path.chmod(0o640)
    with pytest.raises(Refused, match=r"checkpoint\.key, the key of checkpoints, .* chmod 600 it"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(Refused, match=r"is no key: it has less than 32 characters; make one: "):
        read_key(path)
    with pytest.raises(Refused, match=r"checkpoint\.key=/nowhere/key is missing: make one: "):
        own_key(config_of(tmp_path, key="/nowhere/key"), tmp_path)
    if os.geteuid() == 0:
        path.write_text("x" * 64)
        os.chown(path, 12_345, -1)
        with pytest.raises(Refused, match="belongs to another user"):
            read_key(path)


def test_a_signature_is_of_one_key(tmp_path: Path) -> None:
    """Whoever has another key has not signed, but for who says that it does not matter."""
    path = checkpoint_files.write(tmp_path, 2)
    assert objection(config_of(tmp_path), tmp_path, path) == ""
    (path / "signature.json").write_bytes(SigningKey(b"2" * 64).sign((path / "files.json").read_bytes()))
    assert "signed with another key" in objection(config_of(tmp_path), tmp_path, path)
    assert objection(config_of(tmp_path, unsigned=True), tmp_path, path) == ""


def test_a_command_line_refuses_before_anything_starts(tmp_path: Path) -> None:
    """`laminar train` and `laminar submit` look at the newest checkpoint: exit code 2, and nothing is
    touched. resume=never goes on from none, so it asks for none."""
    path = checkpoint_files.write(tmp_path, 2)
    assert not nothing_to_start(config_of(tmp_path))
    (path / "signature.json").unlink()
    with pytest.raises(
        Refused, match=r"step_000002 is not signed: name the key .*checkpoint\.key=FILE.*unsigned"
    ):
        nothing_to_start(config_of(tmp_path))
    assert not nothing_to_start(config_of(tmp_path, unsigned=True))
    fresh = config_of(tmp_path, key=str(tmp_path / "none"))
    fresh.resume = "never"
    with pytest.raises(Refused, match="is missing"):
        nothing_to_start(fresh)
