"""Who gets in at a run's bulk door: holders of its join key while the run lasts, and nobody else."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from helpers.links.proxy import Proxy
from laminar_hpc import __version__
from laminar_hpc.config.directories import examples_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.bulk_door import BulkDoor
from laminar_hpc.line.address import new_address, read_address
from laminar_hpc.line.bulk_client import BulkClient, KeyRefused
from laminar_hpc.line.dealer import connect
from laminar_hpc.line.join_key import (
    JOIN_FILE,
    SECRET_FILE,
    JoinKey,
    follow_controller,
    forget_keys,
    key_of,
    new_join_key,
    read_join_key,
    write_join_key,
)
from laminar_hpc.line.messages import bulk
from laminar_hpc.line.messages.bulk import (
    AppendBytes,
    AskController,
    AskStored,
    AskToJoin,
    ReadBytes,
    Stored,
    decode_reply,
    decode_request,
    encode_bulk,
)
from laminar_hpc.store.payload.writer import FOLDER

NAME = "rollout3_0123abcd.0000"
MODEL = Path(examples_directory("arithmetic/base"))


def opened(run_dir: Path, role: str = "controller", port: int = 0) -> BulkDoor:
    config = RunConfig(run_dir=str(run_dir), role=role)
    config.cluster.storage = "stream"
    config.cluster.join_port = port
    config.model.path = str(MODEL)
    return BulkDoor(config, "store", new_address("run", "127.0.0.1", "here")[0], "slots")


@pytest.fixture
def door(tmp_path) -> Iterator[BulkDoor]:
    made = opened(tmp_path)
    yield made
    made.close(is_over=True)


def ask(key: JoinKey, request: bulk.Request, seconds: float = 15.0) -> tuple[bulk.Reply, bytes]:
    client = BulkClient(key, seconds)
    try:
        return client.ask(request)
    finally:
        client.close()


def stored(run_dir: Path) -> bytes:
    file = run_dir / FOLDER / NAME
    return file.read_bytes() if file.exists() else b""


def test_the_key_is_for_its_owner_alone(door, tmp_path):
    """Both files have mode 0600; a copy that others can read is refused, and so is what is no key."""
    for name in (JOIN_FILE, SECRET_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / SECRET_FILE).read_text() not in (tmp_path / JOIN_FILE).read_text()
    (tmp_path / JOIN_FILE).chmod(0o640)
    with pytest.raises(LaminarError, match="can be read by others: chmod 600"):
        read_join_key(tmp_path / JOIN_FILE)
    (tmp_path / "none").write_text("{}")
    with pytest.raises(LaminarError, match="is no run's key"):
        read_join_key(tmp_path / "none")
    with pytest.raises(LaminarError, match=r"cannot be read .*copy RUN_DIR/join.key"):
        read_join_key(tmp_path / "absent")


def test_strangers_are_refused(door, tmp_path):
    """Without the client's key, and to a door that is another one than the key says: one line, and nothing is
    done. Whoever speaks no ZeroMQ hears nothing."""
    strange, _ = new_join_key("store", "127.0.0.1")
    own = door.key
    for public, secret, server in (
        (strange.client_public, strange.client_secret, own.server_public),
        (own.client_public, own.client_secret, strange.server_public),
    ):
        key = JoinKey("store", own.host, own.port, server, public, secret)
        with pytest.raises(KeyRefused, match="does not know this key: it is another run's, or"):
            ask(key, AskStored(NAME, 1))
    with socket.create_connection((own.host, own.port), 5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        plain.settimeout(5)
        with contextlib.suppress(OSError):
            assert plain.recv(1000)[:1] in (b"", b"\xff"), "more than ZeroMQ's greeting"
    assert not (tmp_path / FOLDER).exists()
    assert isinstance(ask(own, AskStored(NAME, 1))[0], Stored)


def test_a_key_ends_with_its_run(tmp_path):
    """It is gone from the run directory; a copy that somebody has kept opens neither the closed door nor that
    of the next run there, not even at the same port. Where the run goes on after its controller it stays."""
    first = opened(tmp_path)
    kept = read_join_key(tmp_path / JOIN_FILE)
    first.close(is_over=False)
    again = opened(tmp_path)
    assert again.key == kept
    ask(kept, AskController())
    again.close(is_over=True)
    assert not any((tmp_path / name).exists() for name in (JOIN_FILE, SECRET_FILE))
    with pytest.raises(LaminarError, match="has not answered for 0 s"):
        ask(kept, AskController(), 0.4)
    following = opened(tmp_path, port=kept.port)
    assert following.key.port == kept.port
    with pytest.raises(KeyRefused):
        ask(kept, AskController())
    following.close(is_over=True)
    forget_keys(tmp_path)  # once more, as at the next start


def test_one_world_begins_with_a_new_key(tmp_path):
    """Its ranks end with their controller, so nobody is left who would need the old one."""
    first = opened(tmp_path, role="all")
    first.close(is_over=False)
    again = opened(tmp_path, role="all")
    assert again.key.client_public != first.key.client_public
    with pytest.raises(LaminarError, match="in one world, which nobody can join"):
        ask(again.key, AskToJoin(__version__))
    again.close(is_over=True)


def test_what_was_recorded_says_nothing_again(door, tmp_path):
    """All that a client has sent, byte by byte, sent again over a connection of its own: nothing is appended
    or answered."""
    proxy = Proxy(door.key.port)
    proxy.record = bytearray()
    key = msgspec.structs.replace(door.key, port=proxy.port)
    context = zmq.Context()
    dealer = connect(context, b"me", key)
    dealer.send_multipart([encode_bulk(AppendBytes(NAME, 0)), b"once"])
    assert dealer.poll(10_000) and decode_reply(dealer.recv_multipart()[0]) == Stored(NAME, 4)
    context.destroy(0)
    proxy.close()
    assert len(proxy.record) > 300
    (tmp_path / FOLDER / NAME).rename(tmp_path / "before")
    with socket.create_connection((door.key.host, door.key.port), 5) as again:
        again.settimeout(3)
        heard = bytearray()
        with contextlib.suppress(OSError):
            for begin in range(0, len(proxy.record), 64):
                again.sendall(proxy.record[begin : begin + 64])
                time.sleep(0.002)
            while part := again.recv(1000):
                heard += part
    assert len(heard) < 300, "it was let in"
    assert stored(tmp_path) == b"" and (tmp_path / "before").read_bytes() == b"once"


def test_nonsense_from_a_holder_ends_nobody(door, tmp_path):
    """Frames of any number, that are no request, or larger than allowed: refused or cut off; the door goes
    on."""
    context = zmq.Context()
    dealer = connect(context, b"nonsense", door.key)
    asks = encode_bulk(AskController())
    for frames in (
        [b"x"],
        [b"\xff" * 50, b""],
        [asks, b"", b""],
        [b"\x91" * 9000, b""],
    ):
        dealer.send_multipart(frames)
        assert dealer.poll(10_000) and isinstance(decode_reply(dealer.recv_multipart()[0]), bulk.BulkRefused)
    dealer.send_multipart([encode_bulk(AppendBytes(NAME, 0)), bytes(9 << 20)])
    assert not dealer.poll(500)
    context.destroy(0)
    assert ask(door.key, AskStored(NAME, 7))[0] == Stored(NAME, 0, 7)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(frame):
    """Nothing else is raised, and nothing is run."""
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(msgspec.DecodeError):
            assert isinstance(decode(frame), bulk.BulkMessage)


def test_only_the_models_own_files_are_given(door, tmp_path):
    """Of those that a run needs; nothing else of that folder or of the run's."""
    (tmp_path / "checkpoint.key").write_text("secret")
    found = ask(door.key, ReadBytes("config.json", 0, 1 << 20, model=True))[1]
    assert found == (MODEL / "config.json").read_bytes()
    for name in ("../data/train.jsonl", "README.md", str(tmp_path / "checkpoint.key"), "", "."):
        with pytest.raises(LaminarError, match="is no file of the run's model"):
            ask(door.key, ReadBytes(name, 0, 100, model=True))
    for name in ("../checkpoint.key", "checkpoint.key"):
        with pytest.raises(LaminarError, match="is no payload file"):
            ask(door.key, ReadBytes(name, 0, 100))


def test_another_version_is_refused(door):
    """Before it has anything of the run."""
    with pytest.raises(LaminarError, match=f"0.0 is installed here, and the run is of {__version__}"):
        ask(door.key, AskToJoin("0.0"))


def test_a_joined_machine_follows_the_controller(tmp_path):
    """Its own folder has the address of the next one, as the machine reaches it, where its roles look."""
    key, _ = new_join_key("store", "gate.example.org")
    write_join_key(tmp_path / "joined.key", key)
    assert key_of(tmp_path) == key
    for run_id in ("first", "second"):
        address, _ = new_address(run_id, "10.0.0.7", "there")
        follow_controller(tmp_path, address, key.host)
        known = read_address(tmp_path)
        assert known is not None and (known.run_id, known.host) == (run_id, "gate.example.org")
        assert (tmp_path / "controller.json").stat().st_mode & 0o777 == 0o600
