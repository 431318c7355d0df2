"""A console that cannot hurt a run: whatever becomes of it, the process goes on, and nothing is lost."""

import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from laminar_hpc.machine.observability import output

LINES = 300


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Without the logs of an earlier test."""
    monkeypatch.setattr(output, "_log", None)
    output._unshown.clear()


SPEAKER = f"""
import logging, sys, time
from pathlib import Path
from laminar_hpc.machine.observability import output
output.guard()
output.keep_in(Path(sys.argv[1]))
sys.stdin.readline()
begun = time.monotonic()
logging.basicConfig()
for number in range({LINES}):
    print(f"line {{number}}", flush=True)
    logging.warning("warning %d", number)
Path(sys.argv[1], "seconds").write_text(str(time.monotonic() - begun))
"""


def speaker(run_dir: Path, stdout: int | None, **settings) -> subprocess.Popen[bytes]:
    (run_dir / "logs").mkdir()
    command = [sys.executable, "-c", SPEAKER, str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stdout, **settings)


def assert_went_on(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """In order, without a delay, and with all its lines in the logs."""
    assert process.wait(60) == 0
    assert float((run_dir / "seconds").read_text()) < 20
    kept = (run_dir / "logs" / "console.log").read_text()
    assert [line for line in kept.splitlines() if line.startswith("line")] == [
        f"line {number}" for number in range(LINES)
    ]
    assert kept.count("WARNING:root:warning") == LINES


def test_a_reader_that_has_gone(tmp_path):
    """Promise: after the end of `| tee` or `| head` the process goes on, and its lines are in logs/."""
    read_end, write_end = os.pipe()
    process = speaker(tmp_path, write_end)
    os.close(write_end)
    os.close(read_end)
    process.communicate(b"\n", 60)
    assert_went_on(tmp_path, process)


def test_a_disk_without_room(tmp_path):
    """Promise: output that goes to a file on a full disk ends nobody."""
    with open("/dev/full", "wb") as full:
        process = speaker(tmp_path, full.fileno())
        process.communicate(b"\n", 60)
    assert_went_on(tmp_path, process)


def test_a_pipe_that_nobody_reads(tmp_path):
    """Promise: a reader that stands still (less, a stopped tee) delays nobody: once the pipe is full its
    lines go to logs/."""
    read_end, write_end = os.pipe()
    while True:
        os.set_blocking(write_end, False)
        try:
            os.write(write_end, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write_end, True)
    process = speaker(tmp_path, write_end)
    process.communicate(b"\n", 60)
    assert_went_on(tmp_path, process)
    os.close(read_end)
    os.close(write_end)


def test_a_stopped_terminal(tmp_path):
    """Promise: Ctrl-S stops what is shown, not the process."""
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)
    process = speaker(tmp_path, theirs)
    process.communicate(b"\n", 60)
    assert_went_on(tmp_path, process)
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_is_closed(tmp_path):
    """Promise: a closed terminal, whose writes fail, ends nobody who hears its HUP."""
    ours, theirs = pty.openpty()
    process = speaker(tmp_path, theirs, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", 60)
    assert_went_on(tmp_path, process)


def test_no_output_at_all(tmp_path):
    """Promise: a process that was started with its output closed writes into no other file."""
    silent = SPEAKER.replace("sys.stdin.readline()", "")
    command = f"{sys.executable} -c '{silent}' {tmp_path} >&- 2>&- <&-"
    (tmp_path / "logs").mkdir()
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert (tmp_path / "seconds").exists() and not (tmp_path / "logs" / "console.log").exists()


def test_what_was_said_before_the_run_has_its_logs(tmp_path):
    """Promise: lines that nobody could be shown before the run's folder was there are in its logs later."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = output.ConsoleStream(write_end)
    output.keep_in(tmp_path)
    print("early", file=stream, flush=True)
    (tmp_path / "logs").mkdir()
    print("late", file=stream, flush=True)
    assert (tmp_path / "logs" / "console.log").read_text() == "early\nlate\n"
    os.close(write_end)


def test_all_is_shown_in_order_where_the_reader_keeps_up(tmp_path):
    """Promise: what is printed reaches the reader at once, whole and in order, and nothing goes to logs/."""
    (tmp_path / "logs").mkdir()
    read_end, write_end = os.pipe()
    stream = output.ConsoleStream(write_end)
    output.keep_in(tmp_path)
    for number in range(5):
        print("line", number, file=stream)
    stream.write("no newline")
    stream.flush()
    assert os.read(read_end, 4096) == b"line 0\nline 1\nline 2\nline 3\nline 4\nno newline"
    assert not (tmp_path / "logs" / "console.log").exists()
    os.close(read_end)
    os.close(write_end)


def test_a_lossless_stream_waits_for_its_reader_and_hears_of_its_end(tmp_path):
    """Promise: `laminar ... | less` shows all of it, however late it is read."""
    read_end, write_end = os.pipe()
    reader = subprocess.Popen(["bash", "-c", "sleep 1; wc -c"], stdin=read_end, stdout=subprocess.PIPE)
    os.close(read_end)
    stream = output.ConsoleStream(write_end, lossless=True)
    stream.write("x" * 300_000 + "\n")
    os.close(write_end)
    assert reader.communicate()[0].strip() == b"300001"
    read_end, write_end = os.pipe()
    os.close(read_end)
    with pytest.raises(BrokenPipeError):
        output.ConsoleStream(write_end, lossless=True).write("x\n")
    os.close(write_end)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("a\rb\x08\x7f\x9b31m", r"a\rb\x08\x7f\x9b31m"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("größe 数\ttab 😀", "größe 数\ttab 😀"),
        ("\ud800", r"\ud800"),
    ],
)
def test_foreign_text_does_not_steer_the_terminal(text, shown):
    """Promise: what a terminal would obey is shown as an escape; other text stays as it is."""
    read_end, write_end = os.pipe()
    print(text, file=output.ConsoleStream(write_end), flush=True)
    assert os.read(read_end, 4096).decode() == f"{shown}\n"
    os.close(read_end)
    os.close(write_end)


def test_a_forked_process_speaks_too(tmp_path):
    """Promise: the child of a process that has spoken, as an engine's, is heard."""
    read_end, write_end = os.pipe()
    stream = output.ConsoleStream(write_end)
    print("parent", file=stream, flush=True)
    if not (child := os.fork()):
        print("child", file=stream, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 4096) == b"parent\nchild\n"
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("module", ["laminar_hpc.launch.cli", "laminar_hpc"])
def test_words_of_a_command_line_do_not_steer_the_terminal(module):
    """Promise: an error that quotes what it was given shows it with escapes, from commands and from ranks."""
    words = [
        sys.executable,
        "-m",
        module,
        *(["audit"] if module.endswith("cli") else []),
        "x\x1b]0;owned\x07",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2 and r"x\x1b]0;owned\x07" in done.stderr and "\x1b" not in done.stderr
