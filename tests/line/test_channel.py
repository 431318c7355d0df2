"""The channel between controller and workers: authenticated, bounded, and clear about what it waited for."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import zmq

from helpers.links.proxy import Proxy
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line import hub as hub_module
from laminar_hpc.line import stop
from laminar_hpc.line.address import read_address
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.delivery import Header, encode_header
from laminar_hpc.line.endings import ControllerLost, MessageRefused, StopReceived
from laminar_hpc.line.hub import Hub, UnreadableMessage
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.line.messages.membership import Failure, Hello, Ping, Pong, Stop, StopRequest, Welcome
from laminar_hpc.line.messages.publication import NewWeightId, WeightId
from laminar_hpc.line.messages.rollouts import Scored
from laminar_hpc.line.messages.training import Batch, Continue, TakeBatch
from laminar_hpc.line.messages.wire import encode
from laminar_hpc.line.stop import request_stop


class Served:
    """A hub in a thread that answers Hello and Ping like the controller and keeps the rest."""

    def __init__(self, run_dir):
        self.hub = Hub(run_dir, "test", "127.0.0.1", 0, "here")
        self.got, self.running, self.silent = [], True, False
        self.asked = []  # of the thread that has the socket, as ZeroMQ's are for one thread
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        while self.running:
            while self.asked:
                self.asked.pop()(self.hub)
            for identity, message in self.hub.poll(0.02):
                if self.silent:
                    continue
                self.got.append((identity, message))
                if isinstance(message, Hello):
                    self.hub.send(identity, Welcome("test"))
                elif isinstance(message, Ping):
                    self.hub.send(identity, Pong())
                elif isinstance(message, NewWeightId):
                    self.hub.send(identity, Continue(0))
                    self.hub.send(identity, WeightId(7, message.step))
                elif isinstance(message, TakeBatch):
                    self.hub.send(identity, Stop("enough"))
            self.hub.committed()

    def close(self):
        self.running = False
        self.thread.join()
        self.hub.close()


@pytest.fixture
def served(tmp_path):
    server = Served(tmp_path)
    yield server
    server.close()


def connect(tmp_path, heartbeat=10.0, machine="elsewhere"):
    return Channel(tmp_path, Hello("trainer", 0, "i", os.getpid(), machine), 10, heartbeat)


def test_request_leaves_other_messages_in_the_queue(tmp_path, served):
    """A request takes its own answer only; what came before it is received next."""
    channel = connect(tmp_path)
    answer = channel.request(NewWeightId(3), WeightId, timeout=5, what="a weight id")
    assert answer == WeightId(7, 3)
    assert isinstance(channel.receive(5, "anything"), Continue)
    channel.close()


def test_a_turn_takes_some_megabytes_and_knows_what_it_left(tmp_path):
    """docs/promises.md#turns: a flood of large messages is taken in several turns, so that answers leave
    between them; while some of it may wait, nobody counts as heard until now."""
    hub = Hub(tmp_path, "test", "127.0.0.1", 0, "here")
    proxy = Proxy(hub.address.port)
    hub.address.port = proxy.port
    hub.announce("", {})
    line = threading.Thread(target=lambda: channels.append(connect(tmp_path)))
    channels: list[Channel] = []
    line.start()
    deadline = time.monotonic() + 20.0
    while line.is_alive() and time.monotonic() < deadline:
        for identity, message in hub.poll(0.02):
            if isinstance(message, Hello):
                hub.send(identity, Welcome("test"))
    line.join(5)
    for _ in range(20):
        channels[0].send(Stop("x" * 2**20))
    while proxy.passed < 20 * 2**20:  # else a hub that is quicker than the wire meets no flood
        assert time.monotonic() < deadline
        time.sleep(0.01)
    taken = cut = 0
    while taken < 20 and time.monotonic() < deadline:
        begun = time.monotonic()
        sizes = [len(message.reason) for _, message in hub.poll(0.1) if isinstance(message, Stop)]
        taken += len(sizes)
        assert sum(sizes) < 5 * 2**20
        if sum(sizes) >= 4 * 2**20:
            cut += 1
            assert hub.heard_until < begun
        hub.committed()
    begun = time.monotonic()
    while hub.heard_until < begun and time.monotonic() < deadline:
        hub.poll(0.02)
    assert taken == 20 and cut and hub.heard_until >= begun
    channels[0].close(goodbye=False)
    hub.close()
    proxy.close()


def test_who_has_left_is_forgotten(tmp_path, served, monkeypatch):
    """Processes that come and go leave nothing in the controller's memory but the number of their last
    message. A file system that fails is no reason to end either."""
    for life in range(3):
        channel = Channel(tmp_path, Hello("rollout", life, "i", os.getpid(), "elsewhere"), 10, 10)
        channel.send(Scored(life, 0, 1.0, {}, "", 0.0))
        channel.close()
    received = {f"rollout:{life}:i": 2 for life in range(3)}
    deadline = time.monotonic() + 20.0
    while {name: peer.received for name, peer in served.hub._peers.items()} != received:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done = threading.Event()

    def leave(hub: Hub) -> None:
        for life in range(3):
            hub.end(f"rollout:{life}:i")
        done.set()

    served.asked.append(leave)
    assert done.wait(20) and not any(peer.session or peer.speaks for peer in served.hub._peers.values())

    def fails(_: object) -> None:
        raise OSError("Stale file handle")

    monkeypatch.setattr(hub_module, "read_address", fails)
    served.hub.show_address()


def test_a_wait_ends_and_says_for_what(tmp_path, served):
    """Promise: docs/promises.md#bounded-waits."""
    channel = connect(tmp_path)
    with pytest.raises(LaminarError, match=r"trainer 0 waited 0 s for a comet from the controller"):
        channel.receive(0.2, "a comet")
    channel.close()


def test_stop_is_raised_where_one_waits(tmp_path, served):
    """A stop ends a wait for something else, with its reason."""
    channel = connect(tmp_path)
    with pytest.raises(StopReceived, match="enough"):
        channel.request(TakeBatch(0), Batch, timeout=5, what="a batch")
    channel.close()


def test_a_silent_controller_is_noticed(tmp_path, served):
    """A controller without a sign of life is lost after the heartbeat's time, not the wait's."""
    channel = connect(tmp_path, heartbeat=1.0)
    served.silent = True
    started = time.monotonic()
    with pytest.raises(ControllerLost, match="silent for 1 s"):
        channel.receive(20, "anything")
    assert time.monotonic() - started < 6
    channel.close()


def test_nobody_gets_in_without_the_runs_key(tmp_path, served):
    """Messages are authenticated: a client with a key of its own reaches nothing."""
    address = read_address(tmp_path)
    assert oct((tmp_path / "controller.json").stat().st_mode)[-3:] == "600"
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.curve_serverkey = address.server_public.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(f"tcp://{address.host}:{address.port}")
    stranger.send_multipart([encode_header(Header("", 0, 0, 0)), encode(StopRequest("evil"))])
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(f"tcp://{address.host}:{address.port}")
    plain.send_multipart([encode_header(Header("", 0, 0, 0)), encode(StopRequest("evil"))])
    request_stop(tmp_path, "good")  # the proof that the hub was serving meanwhile
    deadline = time.monotonic() + 5
    while not any(isinstance(x, StopRequest) for _, x in served.got) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [x.reason for _, x in served.got if isinstance(x, StopRequest)] == ["good"]
    stranger.close()
    plain.close()
    context.term()


def test_behind_what_is_not_acknowledged_a_long_line_is_kept_busy(tmp_path, served):
    """So that TCP hears of a lost packet by those that come after it; nearby nothing is sent for that."""
    far = Channel(tmp_path, Hello("rollout", 0, "i", os.getpid(), "there", place="paris"), 10, 10.0)
    near = connect(tmp_path)
    committed, served.hub.committed = served.hub.committed, lambda: None
    before = served.hub._frames
    for channel in (far, near):
        channel.send(Scored(1, 0, 0.5, {}, "", 0.0))
    deadline = time.monotonic() + 20
    while served.hub._frames < before + 10 and time.monotonic() < deadline:  # pings come once a second
        time.sleep(0.02)
    assert served.hub._frames >= before + 10
    assert not near._line.idle and not near._line._probes(time.monotonic())
    served.hub.committed = committed
    far.flush()
    assert not far._line._probes(time.monotonic())
    for channel in (far, near):
        channel.close()


GARBAGE = (
    b"",
    b"\xff\x00garbage",
    encode(Ping())[:-1],
    b"\x81\xa4type\xa4Nope",
    encode(Scored(1, 0, None, {}, "", 0.0)),
    encode(PromptGroup(0, [], "", {"a": 0}, []))[:-2] + b"\x81\xa1a" * 100_000 + b"\xc0",
)


def test_garbage_comes_out_as_refused_and_the_channel_lives(tmp_path, served):
    """Frames of all kinds, a nesting that is too deep among them, are told to the loop with their sender and
    a reason."""
    channel = connect(tmp_path)
    for frame in GARBAGE:
        channel._line.put(frame)
    channel.send(NewWeightId(1))
    assert isinstance(channel.request(NewWeightId(2), WeightId, timeout=5, what="an id"), WeightId)
    refused = [
        (identity, message) for identity, message in served.got if isinstance(message, UnreadableMessage)
    ]
    assert len(refused) == len(GARBAGE) and all(
        identity == "trainer:0:i" and message.reason for identity, message in refused
    )
    assert refused[4][1].reason == "Expected `float`, got `None` - at `$.reward`"
    channel.close()


@pytest.mark.parametrize("frame", GARBAGE[1:3])
def test_what_the_worker_cannot_read_is_raised_where_it_waits(tmp_path, served, frame):
    """A worker whose controller says what it cannot read ends at once, with the reason; it does not wait for
    an answer that it has thrown away."""
    channel = connect(tmp_path)
    served.asked.append(lambda hub: hub._router.send_multipart([b"trainer:0:i", frame]))
    with pytest.raises(
        MessageRefused, match=r"a message from the controller was refused: .*install the same version"
    ):
        channel.receive(5, "anything")
    channel.close()


def test_a_controllers_failure_is_the_workers(tmp_path, served):
    """What the controller has against a worker is the worker's error."""
    channel = connect(tmp_path)
    served.asked.append(lambda hub: hub.send("trainer:0:i", Failure("you speak another language")))
    with pytest.raises(LaminarError, match=r"^you speak another language$"):
        channel.receive(5, "anything")
    channel.close()


def test_no_controller_is_said_with_the_time_waited(tmp_path):
    """Joining where no controller is ends with the seconds waited."""
    with pytest.raises(LaminarError, match="waited 0 s for the controller"):
        Channel(tmp_path, Hello("relay", 0, "i", os.getpid(), "x"), 0.3, 10)


def test_stop_request_without_a_job(tmp_path):
    """Stopping a folder without a job says that none runs there."""
    with pytest.raises(LaminarError, match="no job runs in"):
        request_stop(tmp_path, "x")


def test_stop_of_another_users_run(tmp_path, monkeypatch):
    """Its address is for its owner alone, which is said in one line."""
    (tmp_path / "controller.json").touch()

    def read_bytes(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(LaminarError, match=r"controller\.json cannot be read \(Permission denied\)"):
        request_stop(tmp_path, "x")


def test_a_stop_where_the_file_system_fails(tmp_path, served, monkeypatch):
    """A look that fails is made again; what cannot be left for the next controller is said in one line, as a
    launcher hears of it in a signal handler."""
    address, looks = read_address(tmp_path), []

    def look(_):
        looks.append(1)
        if len(looks) == 2:
            raise OSError(errno.ESTALE, "Stale file handle")
        return address

    monkeypatch.setattr(stop, "read_address", look)
    monkeypatch.setattr(stop, "_is_sent", lambda *_: len(looks) == 3)
    assert request_stop(tmp_path, "x")
    monkeypatch.setattr(stop, "_is_sent", lambda *_: False)
    monkeypatch.setattr(stop, "who_waits", lambda _: ["relay 0"])
    (tmp_path / ".stop_request.new").symlink_to("/dev/full")
    with pytest.raises(
        LaminarError, match=r"cannot be left in .* for the next one \(No space left on device\)"
    ):
        request_stop(tmp_path, "x", 0.1)


def test_a_worker_joins_the_controller_of_its_own_torchrun_only(tmp_path, served):
    """A second torchrun on the run directory of a live run, or one started at the same moment: its ranks wait
    for their own controller, which is refused, and do not take the place of the live run's ranks."""
    hello = Hello("trainer", 0, "i", os.getpid(), "here")
    with pytest.raises(LaminarError, match="waited 1 s for the controller"):
        Channel(tmp_path, hello, 1.0, 10, launch="another torchrun")
    assert not served.got
    Channel(tmp_path, hello, 10, 10, launch=read_address(tmp_path).launch).close()
    Channel(tmp_path, Hello("trainer", 0, "j", os.getpid(), "here"), 10, 10).close()


def test_a_worker_whose_place_is_taken_is_told_so(tmp_path, served, monkeypatch):
    """The controller's answer to a second start of a role is the error that the user reads."""
    monkeypatch.setitem(globals(), "Welcome", lambda *_: Failure("trainer 0 is in this run already"))
    with pytest.raises(LaminarError, match="trainer 0 is in this run already"):
        Channel(tmp_path, Hello("trainer", 0, "i", os.getpid(), "here"), 10, 10)
