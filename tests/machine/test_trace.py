"""Traces and metrics: what is written is there at once, and a death in the middle of a line costs that line
only."""

import resource
import struct
import subprocess
import sys
import threading

import pytest
from tensorboardX.proto.event_pb2 import Event

from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.locks.run_lock import LockLost
from laminar_hpc.machine.observability.metrics import MetricsWriter, curves
from laminar_hpc.machine.observability.trace import Trace, read_spans


def test_a_span_is_in_the_file_when_it_ends(tmp_path):
    """Promise: a killed process leaves every span that had ended, also one that ended by an exception, with
    what it learned on the way."""
    trace = Trace(tmp_path, "rollout", 1)
    with pytest.raises(ValueError, match="broken"), trace.span("generate", weight_id=3) as fields:
        fields["tokens"] = 17
        raise ValueError("broken")
    (span,) = read_spans(tmp_path)["rollout1"]
    assert (span.kind, span.fields) == ("generate", {"weight_id": 3, "tokens": 17})
    assert 0 <= span.t1 - span.t0 < 5


def test_a_torn_line_costs_itself_only(tmp_path):
    """Promise: after a death in mid-write, a restarted process appends whole lines, and readers leave out the
    torn one."""
    trace = Trace(tmp_path, "trainer", 0)
    trace.record("train", 1.0, 2.0, step=1)
    trace.close()
    with open(trace.path, "ab") as file:
        file.write(b'{"kind":"train","t0":3.0,"t\xc3')
    assert [s.t0 for s in read_spans(tmp_path)["trainer0"]] == [1.0]
    again = Trace(tmp_path, "trainer", 0)
    again.record("wait", 5.0, 6.0)
    assert [(s.kind, s.t0) for s in read_spans(tmp_path)["trainer0"]] == [("train", 1.0), ("wait", 5.0)]
    assert len(trace.path.read_bytes().splitlines()) == 3


def test_an_unknown_kind_is_refused(tmp_path):
    """Promise: every kind in a trace is one that the summary and the report know."""
    with pytest.raises(ValueError, match="'generat' is no kind of span"):
        Trace(tmp_path, "rollout", 0).record("generat", 0.0, 1.0)


def test_threads_do_not_mix_their_lines(tmp_path):
    """Promise: the publisher's thread and the trainer may record at the same time."""
    trace = Trace(tmp_path, "trainer", 0)
    threads = [
        threading.Thread(
            target=lambda n=n: [trace.record("send", n, n + 1, note="x" * 300) for _ in range(200)]
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_spans(tmp_path)["trainer0"]) == 800


def test_a_full_disk_costs_spans_only(tmp_path, caplog):
    """Promise: nobody dies of what is only to be looked at, and it is said once."""
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace/rollout1.jsonl").symlink_to("/dev/full")
    trace = Trace(tmp_path, "rollout", 1)
    for _ in range(3):
        with trace.span("generate"):
            pass
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        "[Errno 28] No space left on device"
    ]


def test_a_disk_that_takes_a_part_of_a_line(tmp_path):
    """Promise: it is an error, the next line is whole, and so is one of another writer."""
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = jsonl.Appender(path)
    writer.write({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes().endswith(b'{"ste')
    jsonl.Appender(path).write({"step": 3})
    writer.write({"step": 4})
    assert [r["step"] for r in jsonl.read(path)] == [1, 3, 4]


def scalars(folder) -> dict[str, float]:
    """Tag -> value of step 1 in event files. A record is length, checksum, event, checksum."""
    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found |= {value.tag: value.simple_value for value in event.summary.value if event.step == 1}
            at += 16 + length
    return found


def test_nothing_is_written_by_one_that_was_replaced(tmp_path):
    """Promise (docs/promises.md#one-controller): another one writes the metrics by now."""

    def assure() -> None:
        if replaced:
            raise LockLost("another controller has the run")

    replaced = False
    writer = MetricsWriter(tmp_path, assure=assure)
    writer.write("step", step=1)
    replaced = True
    with pytest.raises(LockLost):
        writer.write("step", step=2)
    writer.close()
    assert [r["step"] for r in jsonl.read(tmp_path / "metrics.jsonl")] == [1]


def test_metrics_are_lines_and_curves(tmp_path):
    """Promise: a metrics line is in the file when `write` returns, and its numbers are in TensorBoard's file
    after `close`."""
    writer = MetricsWriter(tmp_path)
    writer.write("start", restored_step=None, pipeline="laminar", derived={})
    line = writer.write("step", step=1, loss=0.25, skipped_updates=0)
    assert [r["kind"] for r in jsonl.read(tmp_path / "metrics.jsonl")] == ["start", "step"]
    assert line["loss"] == 0.25 and line["time"] > 0
    writer.write("evaluation", name="greedy", file="heldout", label="step", step=1, accuracy=0.5)
    writer.write("pull", replica=0, weight_id=1, step=1, seconds=0.2, parts={"load": 0.1})
    writer.close()
    assert scalars(tmp_path / "tensorboard") == {
        "step/loss": 0.25,
        "step/skipped_updates": 0.0,
        "pull/0/weight_id": 1.0,
        "pull/0/seconds": pytest.approx(0.2),
        "pull/0/parts/load": pytest.approx(0.1),
        "evaluation/heldout/greedy/accuracy": 0.5,
    }
    assert dict(curves({"kind": "step", "time": 1.0, "step": 1, "loss": 0.25})) == {"step/loss": 0.25}


def test_metrics_import_no_torch():
    """Promise: the controller, which writes the metrics, runs without torch."""
    code = (
        "import sys, tempfile, pathlib;"
        "from laminar_hpc.machine.observability import console, trace;"
        "from laminar_hpc.report import document, summary;"
        "from laminar_hpc.machine.observability.metrics import MetricsWriter;"
        "w = MetricsWriter(pathlib.Path(tempfile.mkdtemp()));"
        "w.write('step', step=1, loss=1.0); w.close(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
