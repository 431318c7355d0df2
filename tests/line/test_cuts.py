"""Real channels and a real hub over a network that is cut and mended, a controller that is killed and comes
again, and one that takes nothing: nothing is lost, nothing doubled, nobody is blocked."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from helpers.links.keeper import Keeper
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line import controller_watch, unsaid
from laminar_hpc.line.address import read_address, write_address
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.dealer import connect
from laminar_hpc.line.delivery import Header, encode_header
from laminar_hpc.line.endings import ControllerLost
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.line.messages.membership import Goodbye, Hello, Ping, Welcome
from laminar_hpc.line.messages.rollouts import Grant, Lost
from laminar_hpc.line.messages.training import NotYet
from laminar_hpc.line.messages.wire import decode, encode
from laminar_hpc.line.waiting import who_waits

HEARTBEAT = 20.0


def join(folder, patience: float = 0.0, heartbeat: float = HEARTBEAT, machine: str = "elsewhere") -> Channel:
    return Channel(folder, Hello("rollout", 0, "life", os.getpid(), machine), 10, heartbeat, patience)


def speak(channel: Channel, numbers: range) -> None:
    for number in numbers:
        channel.send(Lost(number, 0, "x"))


def heard(channel: Channel, count: int, seconds: float = 40) -> list[int]:
    """The numbers of the next NotYets."""
    deadline, numbers = time.monotonic() + seconds, list[int]()
    while len(numbers) < count:
        message = channel.wait(NotYet, timeout=deadline - time.monotonic())
        assert isinstance(message, NotYet), f"{len(numbers)} of {count} have come"
        numbers.append(int(message.reason))
    return numbers


def until(condition, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connections_that_break_lose_nothing(tmp_path) -> None:
    """Promise: docs/promises.md#delivered-once. TCP resets in the middle of the traffic both ways."""
    keeper = Keeper(tmp_path, through_proxy=True)
    channel = join(tmp_path)
    for cut in range(4):
        speak(channel, range(cut * 500, cut * 500 + 500))
        keeper.say(*range(cut * 500, cut * 500 + 500))
        before = keeper.proxy.passed
        until(lambda before=before: keeper.proxy.passed > before + 5000)
        keeper.proxy.reset()
    assert heard(channel, 2000) == list(range(2000))
    until(lambda: len(keeper.kept) >= 2000)
    assert not channel.pending(Welcome), "it was no member for a while"
    channel.close()
    assert keeper.close() == list(range(2000))


def test_a_connection_that_zeromq_gives_up_is_made_anew(tmp_path) -> None:
    """Bytes that make no sense end a connection for good, as far as ZeroMQ goes."""
    keeper = Keeper(tmp_path, through_proxy=True)
    channel = join(tmp_path)
    speak(channel, range(100))
    until(lambda: len(keeper.kept) == 100)
    keeper.proxy.garble = True
    until(lambda: not keeper.proxy.garble)
    speak(channel, range(100, 200))
    keeper.say(*range(100))
    assert heard(channel, 100) == list(range(100))
    until(lambda: len(keeper.kept) >= 200)
    assert not channel.pending(Welcome), "it was no member for a while"
    channel.close()
    assert keeper.close() == list(range(200))


@pytest.mark.parametrize(
    "seconds", [4, *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (5, 8, 15))]
)
def test_a_network_that_drops_packets_loses_nothing(tmp_path, seconds) -> None:
    """The same for silence of so many seconds: nobody is taken for dead, nothing is said twice."""
    keeper = Keeper(tmp_path, through_proxy=True)
    channel = join(tmp_path)
    keeper.proxy.stalled = True
    speak(channel, range(2000))
    keeper.say(*range(1500))
    ends = time.monotonic() + seconds
    until(lambda: time.monotonic() > ends, seconds + 5)
    keeper.proxy.stalled = False
    assert heard(channel, 1500) == list(range(1500))
    until(lambda: len(keeper.kept) >= 2000)
    assert not channel.pending(Welcome), "it was no member for a while"
    channel.close()
    assert keeper.close() == list(range(2000))


def test_a_connection_that_breaks_under_a_worker_that_does_not_listen(tmp_path) -> None:
    """A whole window waits in its socket meanwhile."""
    keeper = Keeper(tmp_path, through_proxy=True)
    channel = join(tmp_path)
    listens, numbers = threading.Event(), list[int]()

    def note(message) -> None:
        if isinstance(message, NotYet):
            numbers.append(int(message.reason))
            listens.wait()

    channel.subscribe(note)
    keeper.say(*range(1500))
    until(lambda: numbers)
    arrived = -1
    while arrived < keeper.proxy.passed:  # until the window is full: nothing more comes
        arrived = keeper.proxy.passed
        time.sleep(0.3)
    keeper.proxy.reset()
    arrived = keeper.proxy.passed
    until(lambda: keeper.proxy.passed > arrived)
    listens.set()
    until(lambda: len(numbers) == 1500)
    channel.close()
    keeper.close()
    assert numbers == list(range(1500))


def test_a_connection_that_breaks_under_a_controller_that_does_not_listen(tmp_path) -> None:
    """The same with a bound on the controller's socket: about one time in four a ping of ZeroMQ's came in one
    piece with the last of the window, and ended it."""
    keeper = Keeper(tmp_path, through_proxy=True)
    channel = join(tmp_path)
    speak(channel, range(1))
    until(lambda: keeper.kept)
    keeper.frozen = keeper.proxy.stalled = True
    speak(channel, range(1, 1500))
    pinged = time.monotonic() + 2.5
    until(lambda: time.monotonic() > pinged)
    passed, keeper.proxy.stalled = keeper.proxy.passed, False
    until(lambda: keeper.proxy.passed > passed + 50_000)
    keeper.proxy.reset()
    keeper.frozen = False
    until(lambda: len(keeper.kept) >= 1500)
    channel.close()
    assert keeper.close() == list(range(1500))


@pytest.mark.parametrize("deaths", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_controller_dies_and_comes_again(tmp_path, deaths) -> None:
    """Promise: docs/promises.md#outlives-its-controller. Killed in the middle of its turns;
    each message is in one of its lives, once; the worker waits on and is told of each new controller."""
    kept: list[int] = []
    keeper = Keeper(tmp_path)
    channel = join(tmp_path, patience=30)
    for life in range(1, deaths + 1):
        speak(channel, range(life * 1000 - 1000, life * 1000))
        turns = keeper.turns
        until(lambda k=keeper, t=turns: k.turns > t + 1)
        kept += keeper.kill()
        keeper = Keeper(tmp_path, life)
        keeper.say(life)
        assert heard(channel, 1) == [life]
        welcome = channel.wait(Welcome, timeout=0)
        assert isinstance(welcome, Welcome) and welcome.run_id == f"life{life}"
    until(lambda: len(kept) + len(keeper.kept) >= 1000 * deaths)
    channel.close()
    assert kept + keeper.close() == list(range(1000 * deaths))


def test_a_member_taken_for_dead_loses_nothing_that_it_says(tmp_path) -> None:
    """It joins again by itself and goes on in its stream."""
    keeper = Keeper(tmp_path)
    channel = join(tmp_path)
    speak(channel, range(100))
    until(lambda: len(keeper.kept) == 100)
    keeper.take_for_dead()
    speak(channel, range(100, 200))
    assert isinstance(channel.receive(20, "the new Welcome"), Welcome)
    until(lambda: len(keeper.kept) == 200)
    channel.close()
    assert keeper.close() == list(range(200))


def test_a_controller_of_another_store_is_not_joined(tmp_path) -> None:
    """Both ids are named."""
    keeper = Keeper(tmp_path)
    ours = keeper.store.store_id
    channel = join(tmp_path, patience=30)
    keeper.kill()
    for file in tmp_path.glob("store.sqlite*"):
        file.unlink()
    other = Keeper(tmp_path, 1)
    with pytest.raises(LaminarError, match=f"has store {other.store.store_id}, .* works for store {ours}"):
        channel.receive(30, "anything")
    assert not other.members
    channel.close()
    other.close()


def test_a_file_system_that_fails_in_an_outage(tmp_path, monkeypatch) -> None:
    """controller.json cannot be read while the next controller is looked for: it is asked again, and found
    when the file system is back. Of what else fails in the line's thread the role hears, as a line."""
    keeper = Keeper(tmp_path)
    channel = join(tmp_path, patience=40)
    readable, failed = read_address, threading.Event()

    def fails(_: Path) -> None:
        failed.set()
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(controller_watch, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(controller_watch, "read_address", fails)
    keeper.kill()
    assert failed.wait(40)
    keeper = Keeper(tmp_path, 1)
    monkeypatch.setattr(controller_watch, "read_address", readable)
    assert isinstance(channel.receive(40, "the new Welcome"), Welcome)
    monkeypatch.setattr(channel._line.watch, "look", lambda _: 1 / 0)
    with pytest.raises(LaminarError, match="its line to the controller has failed: ZeroDivisionError"):
        channel.receive(40, "anything")
    channel.close()
    keeper.close()


def test_an_outage_is_bounded(tmp_path) -> None:
    """A controller that has died and stays away is given up after `patience_seconds`."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    keeper = Keeper(tmp_path)
    address = read_address(tmp_path)
    address.pid = process.pid
    write_address(tmp_path, address)
    channel = join(tmp_path, patience=2.0, heartbeat=1.0, machine="apart")
    keeper.kill()
    process.kill()
    process.wait()
    began = time.monotonic()
    with pytest.raises(ControllerLost, match="has died"):
        channel.receive(20, "anything")
    assert 1.0 < time.monotonic() - began < 6
    channel.close()


@pytest.mark.parametrize("comes", [True, False])
def test_a_worker_that_is_told_to_end_without_a_controller(tmp_path, comes) -> None:
    """Promise: docs/promises.md#drains. It waits a while for the next controller, which has all that it
    had to say; else it leaves that in the run directory, behind what the last one has committed. Meanwhile
    it shows that it waits there."""
    keeper = Keeper(tmp_path)
    channel = join(tmp_path, patience=30, heartbeat=1.0)
    speak(channel, range(100))
    until(lambda: len(keeper.kept) == 100)
    store_id, kept = keeper.store.store_id, keeper.kill()
    speak(channel, range(100, 200))
    until(lambda: channel.detached)
    assert [text.split(" (")[0] for text in who_waits(tmp_path)] == ["rollout 0"]
    channel.end_within(10.0 if comes else 0.5, leaves_unsaid=True)
    if comes:
        threading.Timer(0.5, lambda: nexts.append(Keeper(tmp_path, 1))).start()
    nexts: list[Keeper] = []
    began = time.monotonic()
    channel.close()
    assert time.monotonic() - began < 6 and who_waits(tmp_path) == []
    if comes:
        assert kept + nexts[0].close() == list(range(200)) and not unsaid.left(tmp_path)
        return
    (path,) = unsaid.left(tmp_path)
    head, frames = unsaid.read(path)
    *words, last = map(decode, frames)
    assert (head.identity, head.store_id, head.first) == ("rollout:0:life", store_id, 101)
    assert [word.trajectory_id for word in words] == list(range(100, 200)) and isinstance(last, Goodbye)


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_unsent_messages_block_nobody(tmp_path, count) -> None:
    """A controller that reads nothing: the caller goes on at once, the controller's death is seen in time,
    and at the next controller everything is there once, whatever had to wait on the disk."""
    keeper = Keeper(tmp_path)
    channel = join(tmp_path, patience=60)
    doomed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    keeper.frozen, channel._line.watch.neighbour = True, doomed.pid
    began = time.monotonic()
    padding = "x" * 300
    for number in range(count):
        channel.send(Lost(number, 0, padding))
    assert time.monotonic() - began < 1 + count / 10_000
    doomed.kill()
    doomed.wait()
    until(lambda: channel._line.watch.detached, 10)
    if count > 10_000:
        until(lambda: channel._line.queue.empty())
        assert channel._line.spooling
    kept = keeper.kill()
    keeper = Keeper(tmp_path, 1)
    until(lambda: len(kept) + len(keeper.kept) >= count)
    channel.close()
    assert kept + keeper.close() == list(range(count))


def test_nonsense_is_refused_with_its_reason(tmp_path) -> None:
    """Promise: whoever has the run's key may say what it likes; the hub goes on, and names what is wrong."""
    keeper = Keeper(tmp_path)
    channel = join(tmp_path)
    deep = b"\x81\xa1a" * 50_000 + b"\xc0"
    grant = Grant(0, 0, 0, [PromptGroup(0, [], "", {"a": 0}, [])], 1.0, 1)
    nested = encode(grant).replace(b"\x81\xa1a\x00", deep)
    frames = {
        "1 parts, not a header": [encode(Ping())],
        "it has no header": [b"\x95" + deep, encode(Ping())],
        "its header makes no sense": [encode_header(Header("", -1, 0, 0)), encode(Ping())],
        "it is message 1000000 where 1 is due": [encode_header(Header("", 10**6, 10**6, 0)), b"x"],
        "it acknowledges message 7 of 0": [
            encode_header(Header(channel._line._session, 0, 0, 7)),
            encode(Ping()),
        ],
        "a Lost without a number": [encode_header(Header("", 0, 0, 0)), encode(Lost(1, 0, "x"))],
        "recursion": [encode_header(Header("", 0, 0, 0)), nested],
        "Expected `int` <= 2147483647": [
            encode_header(Header("", 0, 0, 0)),
            encode(Hello("rollout", 1 << 63, "x", 1, "")),
        ],
        "Expected `int` >= 1": [encode_header(Header("", 0, 0, 0)), encode(Hello("rollout", 1, "x", 0, ""))],
    }
    address, context = read_address(tmp_path), zmq.Context()
    channel.close(goodbye=False)  # the peer below takes its name
    peer = connect(context, b"rollout:0:life", address)
    for message in frames.values():
        peer.send_multipart(message)
    until(lambda: len(keeper.refused) == len(frames))
    for reason in frames:
        assert any(reason in said for said in keeper.refused), (reason, keeper.refused)
    peer.close(0)
    context.term()
    channel = Channel(tmp_path, Hello("rollout", 1, "life", os.getpid(), "elsewhere"), 10, HEARTBEAT)
    speak(channel, range(3))
    until(lambda: len(keeper.kept) == 3)
    channel.close()
    keeper.close()
