"""`python -m laminar_hpc.report.prometheus RUN_DIR FD [KEY_FILE]`: answers scrapes of the run at the
listening socket FD until it is killed. machine/observability/prometheus.py starts it."""

import os
import signal
import socket
import sys
from pathlib import Path

from laminar_hpc.machine.files.secret_file import read_secret
from laminar_hpc.report.prometheus.families import RunCollector
from laminar_hpc.report.prometheus.server import ScrapeServer, app

_NICE = 10  # the run comes first


def main(run_dir: str, descriptor: str, key_file: str = "") -> None:
    """Never returns. Signals to the run's processes are not for this one: it goes with the controller."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    key = read_secret(Path(key_file), "the key of scrapes") if key_file else None
    with ScrapeServer(socket.socket(fileno=int(descriptor)), app(RunCollector(Path(run_dir)), key)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
