"""docs/promises.md#hangs: a loop that stands still is seen by a thread, which dumps all stacks."""

import signal
import subprocess
import sys
import threading
import time

import psutil

from laminar_hpc.machine.loop_watch import LoopWatch

BLOCKED = """
import asyncio, time
from types import SimpleNamespace
from laminar_hpc.rollout import role

class Channel:
    def send(self, message):
        print(type(message).__name__, message.text, flush=True)
    def close(self, goodbye):
        print("closed", goodbye, flush=True)

async def run():
    await asyncio.sleep(0.2)
    a_call_that_blocks()

def a_call_that_blocks():
    time.sleep(100)

role.LOOP_SECONDS = role.LOOP_SECONDS_MAX = 0.5
context = SimpleNamespace(channel=Channel(), index=3)
asyncio.run(role.watched(SimpleNamespace(context=context, run=run)))
"""

GOES_ON = """
import sys, time
from laminar_hpc.machine.loop_watch import LoopWatch
watch = LoopWatch("the loop", 0.5, 0.5, lambda text: print(text, flush=True))
print("goes", flush=True)
while True:
    time.sleep(0.02)
    watch.turned()
"""


def test_a_blocked_event_loop_ends_its_process():
    """Within the limit; the controller is told why, and the log says where it stands."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = "Failure the event loop of rollout 3 has not turned for"
    assert done.stdout.startswith(said) and done.stdout.endswith("closed False\n"), done.stdout
    assert "in a_call_that_blocks" in done.stderr


def test_a_process_that_was_stopped_as_a_whole_stood_not_still():
    """SIGSTOP for three times the limit, then CONT: nobody is told anything."""
    process = subprocess.Popen([sys.executable, "-c", GOES_ON], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "goes\n"
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        while time.monotonic() - stopped < 1.5:
            assert psutil.Process(process.pid).status() in ("stopped", "running")
            time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        used = psutil.Process(process.pid).cpu_times().user
        deadline = time.monotonic() + 20
        while psutil.Process(process.pid).cpu_times().user <= used and time.monotonic() < deadline:
            time.sleep(0.05)  # it runs again
    finally:
        process.kill()
        rest, _ = process.communicate()
    assert rest == ""


def test_one_line_for_each_standstill_and_the_limit_is_what_is_normal(tmp_path):
    """Said once; again after it has turned and stands still anew. The slowest normal turn sets the limit; a
    standstill does not."""
    lines: list[str] = []
    came = threading.Semaphore(0)

    def stuck(text: str) -> None:
        lines.append(text)
        came.release()

    watch = LoopWatch("the loop", 0.2, 5.0, stuck)
    try:
        for _ in range(2):
            assert came.acquire(timeout=10)
            assert not came.acquire(timeout=0.5), "once"
            watch.turned()
        assert watch.limit < 0.5
    finally:
        watch.close()
    assert len(lines) == 2 and lines[0].startswith("the loop has not turned for")
