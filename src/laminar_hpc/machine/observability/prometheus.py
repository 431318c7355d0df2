"""`observability.prometheus`: the port at which a run's figures can be read, and the process that answers
there.

The controller binds the port before anything starts, so that one that is taken is refused, and hands it to a
process of its own (report/prometheus/), which reads the run's files: a scrape costs the controller nothing,
however often it comes.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.scraping import is_loopback, scrape_address
from laminar_hpc.machine.files.secret_file import MAKE_ONE, make_secret, read_secret
from laminar_hpc.machine.observability.console import line
from laminar_hpc.machine.processes import die_with_parent

_PROGRAM = "laminar_hpc.report.prometheus"  # by name: that room reads what this one writes
_KEY_FILE = "prometheus.key"
_BACKLOG = 16


def check_prometheus(config: RunConfig) -> None:
    """Raises LaminarError where nobody can listen at `observability.prometheus`, or its key is none."""
    if address := scrape_address(config.observability.prometheus):
        _listener(*address).close()
        if named := config.observability.prometheus_key:
            _named_key(Path(named))


@contextmanager
def prometheus(config: RunConfig, say: Callable[[str], None], under_way: bool = False) -> Iterator[None]:
    """Figures of the run can be read while this is open; the run directory is there and the run's own. Raises
    LaminarError as `check_prometheus`, but of a run that is `under_way`, which goes on without."""
    try:
        process = _answering(config, say)
    except LaminarError as error:
        if not under_way:
            raise
        say(line("warning", f"{error}; the run goes on without its figures there"))
        process = None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _answering(config: RunConfig, say: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    """The process that answers; None where none is wanted."""
    address = scrape_address(config.observability.prometheus)
    if address is None:
        return None
    with closing(_listener(*address)) as listener:
        process = _started(config, listener, key := _key(config, address[0]))
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    wants = f"  (wants the key in {key})" if key else ""
    say(line("metrics", f"http://{host}:{address[1]}/metrics{wants}"))
    return process


def _listener(host: str, port: int) -> socket.socket:
    setting = f"observability.prometheus={host}:{port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except (OSError, UnicodeError):
        raise LaminarError(
            f"{setting}: {host} is no address of this machine; use PORT for loopback"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise LaminarError(f"{setting} cannot be used ({why}): choose another, or 0 for none") from None
    return listener


def _key(config: RunConfig, host: str) -> Path | None:
    """The file of the key that scrapes have to bring; the run's own is made if it is missing."""
    if named := config.observability.prometheus_key:
        return _named_key(Path(named))
    if is_loopback(host):
        return None
    own = Path(config.run_dir) / _KEY_FILE
    if read_secret(own, "the key of scrapes") is None:
        make_secret(own)
    return own


def _named_key(path: Path) -> Path:
    if read_secret(path, "the key of scrapes") is None:
        raise Refused([f"observability.prometheus_key={path} is missing: {MAKE_ONE}"])
    return path


def _started(config: RunConfig, listener: socket.socket, key: Path | None) -> subprocess.Popen[bytes]:
    """It has the port alone, so that nobody waits at the port of one that has died."""
    logs = Path(config.run_dir) / "logs"
    log = os.open(logs / "prometheus.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    words = [config.run_dir, str(listener.fileno()), *([str(key)] if key else [])]
    try:
        return subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            preexec_fn=die_with_parent,
        )
    finally:
        os.close(log)
