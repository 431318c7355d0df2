"""A machine that has joined a run and sees nothing of it: `laminar join` in a mount namespace of its own, in
which the folders of the run are empty."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.line.join_key import JOIN_FILE, JoinKey, read_join_key


def key_of_run(run_dir: Path, away: Path, seconds: float = 60.0) -> JoinKey:
    """Of a run that starts, copied into the folder `away`."""
    deadline = time.monotonic() + seconds
    while not (run_dir / JOIN_FILE).exists():
        assert time.monotonic() < deadline, f"{run_dir} has no key"
        time.sleep(0.05)
    away.mkdir(exist_ok=True)
    shutil.copy2(run_dir / JOIN_FILE, away / JOIN_FILE)
    return read_join_key(away / JOIN_FILE)


def join(away: Path, address: str, hidden: Sequence[Path], *words: str) -> subprocess.Popen[str]:
    """Its output is piped. `hidden`: folders that it finds empty. `away`: its home, and where it is typed."""
    mounts = [f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in hidden]
    command = [sys.executable, "-m", "laminar_hpc.launch.cli", "join", address, "--key", JOIN_FILE, *words]
    script = " && ".join([*mounts, f"cd {shlex.quote(str(away))}", f"exec {shlex.join(command)}"])
    return subprocess.Popen(
        ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOME": str(away), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
