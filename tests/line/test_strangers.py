"""Who does not hold the run's key can neither get in nor keep others out; bytes of any kind are a message or
refused."""

import contextlib
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.line.address import read_address
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.delivery import DeliveryError, Header, decode_header, encode_header
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.line.messages.membership import Hello, Ping
from laminar_hpc.line.messages.rollouts import Grant, Scored
from laminar_hpc.line.messages.wire import decode, encode
from laminar_hpc.machine.files import open_files

# A controller's end with the limit of open files that shells have, hard too.
SERVED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from laminar_hpc.line.hub import Hub
from laminar_hpc.line.messages.membership import Hello, Ping, Pong, Welcome
hub = Hub(Path(sys.argv[1]), "test", "127.0.0.1", 0, "elsewhere")
while True:
    for identity, message in hub.poll(0.05):
        if isinstance(message, Hello): hub.send(identity, Welcome("test"))
        elif isinstance(message, Ping): hub.send(identity, Pong())
    hub.committed()
"""
IDLE = 1100
FRAMES = (
    encode(Ping()),
    encode(Hello("trainer", 0, "i", 1, "here")),
    encode(Scored(1, 0, 1.0, {"a": 1.0}, "", 0.0)),
    encode(Grant(0, 0, 0, [PromptGroup(0, [1, 2], "text", {"a": [1, {"b": 2}]}, [])], 1.0, 1)),
    encode_header(Header("session", 1, 2, 3, True)),
)


def test_idle_strangers_lock_nobody_out(tmp_path: Path) -> None:
    """More connections than the controller may have files open, all of them silent: a member has joined
    before, another joins meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, IDLE + 500)), hard))
    served = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path)])
    strangers: list[socket.socket] = []
    try:
        deadline = time.monotonic() + 30
        while (address := read_address(tmp_path)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert address is not None
        first = Channel(tmp_path, Hello("rollout", 0, "a", 1, "there"), 30, 30)
        controller = psutil.Process(served.pid)
        while controller.num_fds() < 1024 and time.monotonic() < deadline:
            made = socket.socket()
            made.setblocking(False)
            made.connect_ex((address.host, address.port))
            strangers.append(made)
            if len(strangers) > IDLE:
                strangers.pop(0).close()
            time.sleep(0.0005)
        assert controller.num_fds() >= 1024, "no file is left for a member"
        second = Channel(tmp_path, Hello("rollout", 1, "b", 1, "there"), 20, 30)
        for member in (first, second):
            member.send(Ping())
            member.close()
        assert served.poll() is None
    finally:
        for made in strangers:
            made.close()
        served.kill()
        served.wait()


def test_the_controller_takes_more_files_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hard limit allows it, a thousand strangers do not even delay anybody."""
    limits = {"now": (1024, 1 << 20)}
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _, value: limits.update(now=value))
    open_files.allow_connections(8, meshes=False)
    assert limits["now"][0] > 4096
    limits["now"] = (1024, 1024)
    open_files.allow_connections(8, meshes=False)
    assert limits["now"] == (1024, 1024)


def understood(frame: bytes) -> None:
    """A message, or refused; nothing else is raised, and nothing is run."""
    with contextlib.suppress(msgspec.DecodeError):
        assert isinstance(decode(frame), msgspec.Struct)
    with contextlib.suppress(DeliveryError):
        assert isinstance(decode_header(frame), Header)


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(frame: bytes) -> None:
    """Promise: a frame never runs code and never raises what the controller does not expect."""
    understood(frame)


@settings(max_examples=300)
@given(st.sampled_from(FRAMES), st.integers(0, 400), st.binary(min_size=1, max_size=6), st.booleans())
def test_a_changed_message_is_a_message_or_refused(frame: bytes, place: int, put: bytes, cut: bool) -> None:
    """Real frames, of which some bytes are others, or the end is missing: lengths of gigabytes are among
    them."""
    place %= len(frame)
    understood(frame[:place] + put + (b"" if cut else frame[place + len(put) :]))


@given(st.integers(1, 200_000), st.sampled_from((b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff")))
@settings(max_examples=20)
def test_depth_is_bounded(depth: int, opening: bytes) -> None:
    """Nesting without end is refused, in a row of data too, where any value may stand."""
    understood(opening * depth)
    understood(FRAMES[3][:60] + opening * depth)


def test_a_message_that_is_too_large_ends_its_connection(tmp_path: Path) -> None:
    """The size of a message has a limit at the controller."""
    from laminar_hpc.line.hub import Hub
    from laminar_hpc.line.parcel import MESSAGE_BYTES_MAX

    hub = Hub(tmp_path, "test", "127.0.0.1", 0, "here")
    assert hub._router.getsockopt(zmq.MAXMSGSIZE) == MESSAGE_BYTES_MAX
    hub.close()
