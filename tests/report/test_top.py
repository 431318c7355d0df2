"""`laminar top`: one frame of a run that goes on, has ended, died, or is older than the status file."""

import os
import time

import pytest

from helpers import synthetic
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.report import top
from laminar_hpc.report.live import RunFollower
from laminar_hpc.store import status
from laminar_hpc.store.status import Queues, RankStatus, Status


def now_status(when: float) -> Status:
    load = ReplicaLoad(
        "draining",
        7,
        40,
        3,
        running=32,
        queued=8,
        kv_tokens=30_000,
        kv_capacity=40_000,
        tokens_per_second=5120.0,
    )
    ranks = [
        RankStatus("trainer", 0, 11, "m", when, 8, 8),
        RankStatus("relay", 0, 12, "m", when, 8, 8),
        RankStatus("rollout", 0, 13, "m", when, 7, 7, load),
        RankStatus("rollout", 1, 14, "m", when - 6, None, None, ReplicaLoad("unverified", None, 0, 0)),
    ]
    return Status(when, 10, "m", 3, 60, "", 8, ranks, Queues(5, 2, 4, 1, 1, "2 of 8 groups are finished"))


def frame(run_dir, capsys) -> tuple[str, int]:
    code = cli.run(["top", str(run_dir), "--once"])
    return capsys.readouterr().out, code


def test_a_run_that_goes_on(tmp_path, capsys):
    """Promise: ranks, weight ids, KV use, queues, staleness and tokens per second are on one screen."""
    run_dir = tmp_path / "run"
    synthetic.write(run_dir, steps=3, start=time.time() - 5, crash=True)
    status.write(run_dir, now_status(time.time()))
    text, code = frame(run_dir, capsys)
    assert (
        code == 0 and "run  going on" in text and "step 3/60" in text and "tok/s" in text and "stale " in text
    )
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "13  id 7 (step 7)  draining" in rows["rollout0"]
    assert " 75% of 40k" in rows["rollout0"] and "5.1k" in rows["rollout0"]
    assert "silent 6.0s" in rows["rollout1"] and "none yet" in rows["rollout1"]
    assert "id 8 (step 8)" in rows["trainer0"] and "publish 0.0s" in rows["trainer0"]
    queues = [
        "5 groups being generated",
        "2 ready",
        "4 answers without a score",
        "1 replicas want work",
        "1 evaluations",
    ]
    assert rows["queues"].split(None, 1)[1] == "  ".join(
        [*queues, "trainer waits: 2 of 8 groups are finished"]
    )
    assert max(map(len, text.splitlines())) <= top.PIPE_WIDTH and "\x1b" not in text


def test_a_run_that_ended_and_one_without_a_status(finished, capsys):
    """Promise: an ended run, and one from before the status file, show what their files hold."""
    text, code = frame(finished[0], capsys)
    assert (
        code == 0
        and "ended: finished" in text
        and "step 12" in text
        and "heldout 0.880 (sampled, after" in text
    )
    for name in ("trainer0", "relay0", "rollout0", "rollout1", "controller0"):
        assert name in text


def test_moves_from_the_living_and_the_dead(tmp_path, capsys):
    """A rescue has no source: its replica was dead. `laminar top` shows it beside other moves."""
    run_dir = tmp_path / "run"
    synthetic.write(run_dir, steps=3, start=time.time() - 5, crash=True)
    status.write(run_dir, now_status(time.time()))
    metrics = jsonl.Appender(run_dir / "metrics.jsonl")
    move = {"kind": "move", "time": time.time(), "trajectory_id": 5, "destination": 1, "weight_id": 7}
    move |= {"tokens": 90, "prefix_tokens": 64, "seconds": 0.25}
    metrics.write({**move, "source": 0})
    assert "last 0 to 1 on id 7 in 0.25 s: 90 tokens, 64 of prefill saved" in frame(run_dir, capsys)[0]
    metrics.write({**move, "source": None, "loaded": True})
    text = frame(run_dir, capsys)[0]
    assert "1 from dead replicas, 1 by loading their weights" in text and "last a dead one to 1" in text


def test_a_run_that_died(tmp_path, capsys):
    """Promise: no end and no sign of life is said as such, with the cure, and gives exit code 1."""
    run_dir = tmp_path / "run"
    synthetic.write(run_dir, steps=3, crash=True, start=time.time() - 900)
    text, code = frame(run_dir, capsys)
    assert code == 1 and "died: no end was recorded; last sign of life" in text and "resume=auto" in text


def test_a_resumed_run_follows_what_is_new(tmp_path):
    """Promise: looks read only what is new; a torn last line waits for its end; steps that are done again
    count once; an old launch's status is not shown."""
    metrics = jsonl.Appender(tmp_path / "metrics.jsonl")
    begun = time.time()
    metrics.write({"kind": "start", "time": begun, "restored_step": None, "pipeline": "laminar"})
    status.write(tmp_path, now_status(begun))
    follower = RunFollower(tmp_path)
    assert follower.look().state == "going on" and not follower.view.steps
    record = {"kind": "step", "time": begun + 1, "step": 1, "seconds": 1.0}
    metrics.write(record)
    metrics.write({**record, "step": 2})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"step","ti')
        file.flush()
        assert [step["step"] for step in follower.look().steps] == [1, 2]
        file.write(b'me":1.0,"step":3}\n')
    assert [step["step"] for step in follower.look().steps] == [1, 2, 3]
    metrics.write({"kind": "end", "time": begun + 2, "reason": "SIGTERM", "step": 3})
    assert follower.look().state == "ended"
    metrics.write({"kind": "start", "time": begun + 60, "restored_step": 2, "pipeline": "laminar"})
    view = follower.look()
    assert [step["step"] for step in view.steps] == [1, 2] and view.status is None and view.reason == ""
    metrics.write({"kind": "restored", "time": begun + 61, "restored_step": 1, "groups": 4})
    assert [step["step"] for step in follower.look().steps] == [1], "the trainers took an older checkpoint"


def test_a_long_trace_is_read_from_its_end(tmp_path):
    """Promise: a frame costs the same after a million spans."""
    jsonl.Appender(tmp_path / "metrics.jsonl").write({"kind": "start", "time": 0.0, "restored_step": None})
    trace = Trace(tmp_path, "rollout", 0)
    for i in range(3000):
        trace.record("generate", i, i + 0.5, batch_id=i)
    trace.record("score", 4000, 4001)
    (newest,) = RunFollower(tmp_path).look().processes.values()
    assert (newest["kind"], newest["t1"]) == ("generate", 2999.5)


def test_wrong_words(tmp_path):
    """Promise: what is no run is refused in one line."""
    with pytest.raises(LaminarError, match=r"is no run: no metrics.jsonl there; name the run_dir"):
        cli.run(["top", str(tmp_path), "--once"])


def test_a_full_disk_ends_no_run(tmp_path, caplog):
    """Promise: the display can fail, the run goes on."""
    status.write(tmp_path / "gone", now_status(0.0))
    assert "cannot be written" in caplog.text
    assert status.read(tmp_path) is None and not os.listdir(tmp_path)


def test_several_machines_are_named(tmp_path, capsys):
    """Promise (docs/stuck.md): on several machines one sees on which of them a silent rank is."""
    run_dir = tmp_path / "run"
    synthetic.write(run_dir, steps=3, start=time.time() - 5, crash=True)
    now = now_status(time.time())
    now.ranks[3].machine = "n2/58"
    status.write(run_dir, now)
    rows = {line.split()[0]: line.split() for line in frame(run_dir, capsys)[0].splitlines() if line.strip()}
    assert [rows[name][1:3] for name in ("rank", "rollout0", "rollout1", "controller0")] == [
        ["machine", "pid"],
        ["m", "13"],
        ["n2", "14"],
        ["m", "10"],
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_column_is_cut_on_a_narrow_screen(tmp_path, monkeypatch, capsys, width):
    """Promise: from 80 columns on each column that is shown is whole; the least important ones are left
    out."""
    run_dir = tmp_path / "run"
    synthetic.write(run_dir, steps=3, start=time.time() - 5, crash=True)
    status.write(run_dir, now_status(time.time()))
    monkeypatch.setattr(top, "PIPE_WIDTH", width)
    text, _ = frame(run_dir, capsys)
    table = text.split("\n\n")[1].splitlines()
    heads = table[0].replace("KV cache", "KV").split()
    assert heads == [
        name
        for name in "rank pid weights state running queued scoring KV tok/s last".split()
        if name in heads
    ]
    assert {"rank", "weights", "state", "running", "KV", "tok/s"} <= set(heads)
    assert len(heads) == {80: 6, 160: 10}.get(width, len(heads))
    assert "…" not in text and "..." not in text and max(map(len, text.splitlines())) <= width
    (replica,) = [line for line in table if line.startswith("rollout0")]
    assert "id 7 (step 7)  draining" in replica and "75% of 40k" in replica and "5.1k" in replica


def test_the_age_is_that_of_the_run(tmp_path, capsys):
    """Promise: the first line has the run's age, also when its controller was started again a moment ago; and
    no label runs into its text."""
    run_dir, now = tmp_path / "run", time.time()
    metrics = jsonl.Appender(run_dir / "metrics.jsonl")
    metrics.write({"kind": "start", "time": now - 7200, "restored_step": None, "pipeline": "laminar"})
    metrics.write({"kind": "start", "time": now - 1, "restored_step": None, "pipeline": "laminar"})
    metrics.write({"kind": "lost", "time": now, "replica": 0})
    status.write(run_dir, now_status(now))
    text, _ = frame(run_dir, capsys)
    assert "age 2h00m" in text.splitlines()[0] and "incidents 1 attempts lost" in text


def test_foreign_text_does_not_steer_the_terminal(tmp_path, capsys):
    """Promise: what a reward, a stop's reason or a folder's name brings is shown with escapes."""
    steers, run_dir = "\x1b]0;owned\x07\u202e\nstep 9/9", tmp_path / "run\x1b[2J"
    metrics = jsonl.Appender(run_dir / "metrics.jsonl")
    metrics.write({"kind": "start", "time": time.time(), "restored_step": None, "pipeline": "laminar"})
    metrics.write({"kind": "reward_error", "time": time.time(), "text": steers})
    state = now_status(time.time())
    state.stopping = steers
    status.write(run_dir, state)
    text, _ = frame(run_dir, capsys)
    assert not set(text) & {"\x1b", "\x07", "\u202e"} and "\nstep 9/9" not in text
    assert text.startswith(r"run\x1b[2J") and r"\x1b]0;owned\x07\u202e step 9/9" in text
