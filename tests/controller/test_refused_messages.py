"""A real controller, and workers that send it what it cannot read: one line with sender and reason, never a
traceback or a wait."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import read_address
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.delivery import Header, encode_header
from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.line.messages.membership import Failure, Hello, Ping, Welcome
from laminar_hpc.line.messages.publication import NewWeightId, WeightId
from laminar_hpc.line.messages.rollouts import Grant, Lost
from laminar_hpc.line.messages.training import StepDone
from laminar_hpc.line.messages.wire import encode

GROUP = PromptGroup(0, [], "", {"a": 0}, [])
DEEP = b"\x81\xa1a" * 50_000 + b"\xc0"


class Run:
    """The controller of a run with roles apart; the test is its workers."""

    def __init__(self, folder: Path, role: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laminar_hpc", "experiment=demo", f"role={role}", f"run_dir={folder}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
        )

    def join(self, role: str, name: str = "") -> Channel:
        return Channel(self.folder, Hello(name or role, 0, "i", os.getpid(), "elsewhere"), 30, 10)

    def end(self) -> tuple[int, list[str], float]:
        """Exit code, the lines of both outputs, and how long it took from now on."""
        begun = time.monotonic()
        out, error = self.process.communicate(timeout=20)
        return self.process.returncode, [*out.splitlines(), *error.splitlines()], time.monotonic() - begun


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(tmp_path / "run", request.param)
    yield run
    run.process.kill()
    run.process.communicate()


def say(channel: Channel, frame: bytes) -> None:
    """Bytes that no worker of this version would send."""
    channel._line.put(frame)


def stranger(folder: Path, identity: bytes, known: bool) -> zmq.Socket:
    """A socket to the controller, with the run's key or with one of its own."""
    address = read_address(folder)
    assert address is not None
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.curve_serverkey = address.server_public.encode()
    public, secret = address.client_public.encode(), address.client_secret.encode()
    socket.curve_publickey, socket.curve_secretkey = (public, secret) if known else zmq.curve_keypair()
    socket.connect(f"tcp://{address.host}:{address.port}")
    return socket


@pytest.mark.parametrize(
    ("run", "frame", "reason"),
    [
        ("all", encode(Lost(1, 0, 7)), "Expected `str`, got `int` - at `$.reason`"),
        ("all", encode(Grant(0, 0, 0, [GROUP], 1.0, 1)).replace(b"\x81\xa1a\x00", DEEP), "recursion"),
        ("controller", encode(Welcome("x")), "a trainer sends no Welcome"),
    ],
    ids=["type", "depth", "kind"],
    indirect=["run"],
)
def test_what_a_trainer_says_and_cannot_be_read_ends_the_run_in_a_second(
    run: Run, frame: bytes, reason: str
) -> None:
    """Promise: one line names the sender and what is wrong, in one world and with roles apart."""
    trainer = run.join("trainer")
    say(trainer, frame)
    code, lines, seconds = run.end()
    errors = [line for line in lines if "error" in line.lower() or "Traceback" in line]
    assert code and len(errors) == 1 and seconds < 5
    assert (
        errors[0].startswith("laminar: error: a message from trainer 0 was refused: ") and reason in errors[0]
    )
    assert "install the same version of laminar_hpc on all machines" in errors[0]
    trainer.close()


@pytest.mark.parametrize("run", ["controller"], indirect=True)
def test_who_can_be_done_without_goes_and_strangers_change_nothing(run: Run) -> None:
    """Promise: a rollout that cannot be read ends with the reason, and is named, and the run goes on; so it
    does after frames without the run's key, under names that are no role and index, and from who is no
    member."""
    trainer, rollout = run.join("trainer"), run.join("rollout")
    sockets = [
        stranger(run.folder, identity, known)
        for identity, known in (
            (b"trainer:0:i", False),
            (b"\xff\xfe", True),
            (b"cook", True),
            (b"rollout:x:1", True),
            (b"rollout:9:z", True),
        )
    ]
    for socket in sockets:
        for frame in (b"", b"\xc1", DEEP, encode(Ping()), encode(Hello("cook", -1, "", 0, ""))):
            socket.send(frame)
            socket.send_multipart([encode_header(Header("", 0, 0, 0)), frame])
    with pytest.raises(
        LaminarError, match="a message from cook:0:i was refused: cook 0 is no place in this run"
    ):
        run.join("cook")
    say(rollout, encode(StepDone(3, {})))
    with pytest.raises(LaminarError, match="rollout 0 was refused: a rollout sends no StepDone"):
        rollout.receive(10, "an answer")
    answer = trainer.request(NewWeightId(0), WeightId, timeout=10, what="a weight id")
    assert isinstance(answer, WeightId) and run.process.poll() is None
    trainer.send(Failure("enough", permanent=True))
    code, lines, _ = run.end()
    said = [line for line in lines if "refused" in line]
    assert (
        code
        and len(said) == 1
        and said[0].startswith("a message from rollout 0")
        and said[0].endswith("the others go on")
    )
    assert [json.loads(line)["kind"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()] == [
        "start",
        "end",
    ]
    for channel in (trainer, rollout):
        channel.close(goodbye=False)
    for socket in sockets:
        socket.close()
