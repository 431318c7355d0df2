"""How long the jobs of a run wait for one whose node has died: until Slurm has noticed (SlurmdTimeout, 300 s
by default), has let the credentials of the job's earlier life expire (cred_expire in AuthInfo, 120 s), and
its processes have started again."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.config.schema import RunConfig

_KEY = "cluster.join_timeout_seconds"
_START_SECONDS = 180  # of a job's processes
_CREDENTIAL_SECONDS = 120
_CONFIGURATIONS = (Path("/etc/slurm/slurm.conf"), Path("/run/slurm/conf/slurm.conf"))


def slurm_configuration() -> str:
    """What `scontrol show config` says; "" where there is no Slurm that answers."""
    if shutil.which("scontrol") is None:
        return ""
    if not os.environ.get("SLURM_CONF") and not any(path.exists() for path in _CONFIGURATIONS):
        return ""  # scontrol would ask the network
    try:
        command = ["scontrol", "show", "config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def patience(config: RunConfig, words: Sequence[str], configuration: str) -> list[str]:
    """The setting that makes jobs wait long enough under this Slurm; none if they do, or the user set it."""
    noticed = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", configuration, re.MULTILINE)
    if noticed is None or any(word.startswith(f"{_KEY}=") for word in words):
        return []
    expires = re.search(r"cred_expire=(\d+)", configuration)
    needed = int(noticed[1]) + int(expires[1] if expires else _CREDENTIAL_SECONDS) + _START_SECONDS
    return [f"{_KEY}={needed}"] if needed > config.cluster.join_timeout_seconds else []
