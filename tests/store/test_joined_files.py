"""Logs and traces of a machine that shares no folder with the run: what comes to the run's side, and what
does not."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from helpers.links.bulk_stand import BulkStand
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller import joined_files
from laminar_hpc.controller.joined_files import JoinedFiles
from laminar_hpc.launch import cli
from laminar_hpc.line.join_key import JOINED_FILE
from laminar_hpc.line.messages.bulk import (
    LOG_BYTES_MAX,
    AppendTrace,
    AskLog,
    BulkRefused,
    LogSent,
    SendLog,
    TraceStored,
    decode_request,
    encode_bulk,
)
from laminar_hpc.report import logs
from laminar_hpc.store import joined_files as own_files
from laminar_hpc.store import status
from laminar_hpc.store.payload import upload


class JoinedStand(BulkStand):
    """A run, and rollout 3 on a machine with a folder of its own, with a proxy between them."""

    def __init__(self, folder: Path) -> None:
        for path in (folder / "run/logs", folder / "here/logs", folder / "here/trace"):
            path.mkdir(parents=True)
        (folder / "run/logs/controller0.log").write_text("first\nlast\n")
        super().__init__(folder, key_file=JOINED_FILE)
        self.trace = self.here / "trace" / "rollout3.jsonl"
        self.arrived = self.run_dir / "trace" / "rollout3.jsonl"

    def fetched(self, name: str) -> bytes:
        """Once the rollout has been heard."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return logs.fetched(self.run_dir, name)
            except LaminarError as error:
                if "is not there now" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


@pytest.fixture
def stand(tmp_path) -> Iterator[JoinedStand]:
    made = JoinedStand(tmp_path)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def same(stand: JoinedStand) -> bool:
    with suppress(OSError):
        return stand.arrived.read_bytes() == stand.trace.read_bytes()
    return False


def test_logs_of_a_joined_machine_are_read_at_the_runs_side(stand, capsys):
    """Of its rollout, its engine, and its relay by the machine that both are on; the end of a long one; a log
    of the run's own is read where it lies."""
    for name in ("rollout3", "engine3", "relay7", "secret"):
        (stand.here / "logs" / f"{name}.log").write_text(f"first of {name}\nlast of {name}\n")
    assert stand.fetched("rollout3") == b"first of rollout3\nlast of rollout3\n"
    ranks = [
        status.RankStatus(role, index, 1, "there", 0.0) for role, index in (("relay", 7), ("rollout", 3))
    ]
    queues = status.Queues(0, 0, 0, 0, 0)
    status.write(stand.run_dir, status.Status(0.0, os.getpid(), "here", 0, 9, "", None, ranks, queues))
    for words, said in (
        (["rollout-3", "--lines", "1"], "last of rollout3\n"),
        (["engine3"], "first of engine3\nlast of engine3\n"),
        (["relay-7", "--lines=1"], "last of relay7\n"),
        (["controller-0", "--lines=1"], "last\n"),
    ):
        assert cli.run(["logs", str(stand.run_dir), *words]) == 0
        assert capsys.readouterr().out == said
    assert cli.run(["logs", str(stand.run_dir)]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in listed] == ["controller0", "relay7", "rollout3"]
    assert listed[1][1] == listed[2][1] == "on there"
    (stand.here / "logs" / "rollout3.log").write_bytes(b"x" * LOG_BYTES_MAX + b"the end")
    text = stand.fetched("rollout3")
    assert len(text) == LOG_BYTES_MAX and text.endswith(b"xthe end")


def test_nothing_but_logs_of_ranks_is_given(stand, tmp_path):
    """Which file is read is said by the machine: what is no rank's name is no request, a link is not
    followed, and an answer that nobody has asked for is nobody's."""
    for name in ("secret", "../joined.key", "rollout3/../../joined.key", "rollout", "rollout3\n", ""):
        with pytest.raises(msgspec.DecodeError):
            decode_request(encode_bulk(AskLog(name, 100)))
        with pytest.raises(msgspec.DecodeError):
            decode_request(encode_bulk(AppendTrace(name, 0)))
    (stand.here / "logs" / "rollout3.log").symlink_to(stand.here / JOINED_FILE)
    assert stand.fetched("rollout3") == b""
    with pytest.raises(LaminarError, match=r"logs/engine3.log on its machine cannot be read \(No such file"):
        stand.fetched("engine3")
    joined = JoinedFiles(tmp_path)
    joined.heard("theirs", "rollout3")
    joined.handle("asker", AskLog("rollout3", 100), b"")
    assert list(joined.settle()) == [("theirs", (SendLog("rollout3", 100, 1), b""))]
    assert joined.handle("another", LogSent(1), b"made up") is None and list(joined.settle()) == []


def test_a_machine_that_has_gone_is_one_line(stand, tmp_path):
    """That never was there, has left, or does not answer; and a name that there is not."""
    with pytest.raises(
        LaminarError, match=r"^rollout4 is not there now: its machine has left the run, or the"
    ):
        logs.fetched(stand.run_dir, "rollout4")
    now = [100.0]
    joined = JoinedFiles(tmp_path, lambda: now[0])
    joined.heard("theirs", "rollout3")
    joined.handle("asker", AskLog("rollout3", 100), b"")
    assert len(list(joined.settle())) == 1
    now[0] += 6
    ((asker, (answer, _)),) = joined.settle()
    assert asker == "asker" and isinstance(answer, BulkRefused) and "the line to it is cut" in answer.reason
    now[0] += 6
    with pytest.raises(LaminarError, match="rollout3 is not there now"):
        joined.handle("asker", AskLog("rollout3", 100), b"")
    for words, said in (
        (["trainer9"], "there is no log of trainer9 in .*: controller0"),
        (["a", "b"], "takes a run and the name of one log"),
        (["--lines=0"], "--lines=0: write a number from 1 on"),
    ):
        with pytest.raises(LaminarError, match=said):
            cli.run(["logs", str(stand.run_dir), *words])
    with pytest.raises(LaminarError, match="is no run directory"):
        cli.run(["logs", str(tmp_path / "none")])


def test_a_trace_arrives_line_by_line_once(stand, monkeypatch):
    """Whole lines, over a line that is cut and a door that opens again; the rest when the rollout leaves, and
    what its relay has written."""
    monkeypatch.setattr(upload, "_CONTROLLER_SECONDS", 0.1)
    monkeypatch.setattr(own_files, "_AGAIN_SECONDS", 0.5)
    stand.proxy.cuts = [3_000, 9_000]
    with open(stand.trace, "w") as file:
        file.write("".join(f'{{"kind": "generate", "n": {n}}}\n' for n in range(500)))
        file.flush()
        wait_until(lambda: same(stand))
        stand.door.close(is_over=False)
        file.write('{"kind": "pull"}\n{"kind": "to')
        file.flush()
        stand.open()
        wait_until(lambda: stand.arrived.read_text().endswith('{"kind": "pull"}\n'))
        file.write('rn"}\n')
        file.flush()
        (stand.here / "trace" / "relay7.jsonl").write_text('{"kind": "relay"}\n')
        (stand.here / "trace" / "trainer0.jsonl").write_text('{"kind": "train"}\n')
        stand.uploader.close()
    assert same(stand)
    assert sorted(path.name for path in stand.arrived.parent.iterdir()) == ["relay7.jsonl", "rollout3.jsonl"]
    assert (stand.run_dir / "trace" / "relay7.jsonl").read_text() == '{"kind": "relay"}\n'


def test_a_trace_that_cannot_be_written_ends_nobody(tmp_path, monkeypatch):
    """A full disk at the run's side: it is not said to be there, and comes again; bytes that do not begin
    where the file ends are not taken."""
    joined, lines = JoinedFiles(tmp_path), b'{"kind": "pull"}\n'
    first = AppendTrace("rollout3", 0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(joined_files.os, "open", full)
        assert joined.handle("theirs", first, lines) == (TraceStored("rollout3", 0), b"")
    for request, stored in ((first, 17), (first, 17), (AppendTrace("rollout3", 40), 17)):
        assert joined.handle("theirs", request, lines) == (TraceStored("rollout3", stored), b"")
    assert (tmp_path / "trace" / "rollout3.jsonl").read_bytes() == lines
    shutil.rmtree(tmp_path / "trace")
    (tmp_path / "trace").symlink_to(tmp_path / "nowhere")
    assert joined.handle("theirs", first, lines) == (TraceStored("rollout3", 0), b"")
