"""docs/promises.md#drains: how a process ends that was told to end and takes too long."""

import signal
import subprocess
import sys

import pytest

RANK = """
import sys, time
from laminar_hpc.launch import leaving

leaving.LEAVE_SECONDS, leaving.ONE_SIGNAL_SECONDS = 0.3, 0.1


class Channel:
    has_said_all = sys.argv[1] == "True"

    def end_within(self, seconds, leaves_unsaid): ...

    def interrupt(self, error): ...


leaving.watch_signals("rollout").append(Channel())
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("has_said_all", [True, False])
def test_who_has_said_all_has_not_failed(has_said_all: bool) -> None:
    """Promise: on a busy machine an engine may take longer to end than there is time; the exit code tells
    whether anything was left to be said, and the log where it stood."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(has_said_all)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (0 if has_said_all else 1)
    assert "not gone 0.3 s after it was told to end; it stands at:" in said and "<module>" in said
