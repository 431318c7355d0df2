"""Whether the controller that a worker speaks to is there, and where the next one is: no socket, no thread.

line/worker_line.py says what it hears and asks once a turn.
"""

import logging
import time
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import ControllerAddress, read_address
from laminar_hpc.line.agent_line import orders
from laminar_hpc.line.endings import RUN_FAILED, ControllerLost, StopReceived
from laminar_hpc.line.join_key import has_joined
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.line.waiting import sign_of
from laminar_hpc.machine.processes import process_is_alive

log = logging.getLogger(__name__)
_SILENT_SECONDS = 0.2  # before that a controller that was heard lives
_ASLEEP_SECONDS = 5.0  # between two looks: this process stood still, not the controller
_LOOK_SECONDS = 3.0  # after this silence controller.json may name another controller
# ZeroMQ connects again by itself within 3 to 5 s, but never after bytes that made no sense to it
_ANEW_SECONDS = 8.0
_BETWEEN_LOOKS_SECONDS = 0.25  # into controller.json, which may lie on a file system of all machines


class ControllerWatch:
    """`heartbeat`: silent for so long the controller is lost; with `patience` it, or another one over the
    same store, may come back within that time of silence."""

    def __init__(self, run_dir: Path, hello: Hello, heartbeat: float, patience: float) -> None:
        self._run_dir = run_dir
        self._hello = hello
        self._heartbeat = heartbeat
        self.patience = patience
        self._address: ControllerAddress | None = None
        self.neighbour: int | None = None  # the controller's pid, if it is on this machine
        self._sign = sign_of(run_dir, hello)
        self.store_id = ""
        self._heard = self._asked = self._connected = time.monotonic()
        self._read_at = 0.0
        self.detached = False  # the role goes on without a controller
        self.ends_at: float | None = None  # it was told to end, and waits no longer than this

    def begin(self, address: ControllerAddress) -> None:
        """This is the controller from here on; a connection to it begins now."""
        self._address = address
        self._connected = time.monotonic()
        self.neighbour = address.pid if address.machine == self._hello.machine else None

    def welcomed(self, hello: Hello, store_id: str) -> None:
        """`hello`: as which it is in the run."""
        self.store_id = store_id
        self.detached = False
        self._sign.take_away()
        self._hello = hello
        self._sign = sign_of(self._run_dir, hello)
        self._heard = self._asked = time.monotonic()

    def heard(self, now: float, joining: bool) -> None:
        self._heard = now
        if self.detached and not joining:
            log.warning("the controller is heard again")
            self.detached = False
        if not joining:
            self._sign.take_away()

    def end_within(self, seconds: float) -> None:
        """The role was told to end: without a controller for so long it leaves."""
        if self.patience and self.ends_at is None:
            self.ends_at = time.monotonic() + seconds

    def close(self) -> None:
        self._sign.take_away()

    def has_left(self) -> bool:
        """It has taken its address away, or another one has come."""
        try:
            address = read_address(self._run_dir)
        except OSError:  # nobody knows
            return False
        return address is None or self._address is None or address.run_id != self._address.run_id

    def gives_up(self, now: float) -> ControllerAddress | None:
        """The controller, when its connection has carried nothing for so long that it must be made anew."""
        return self._address if now - max(self._heard, self._connected) > _ANEW_SECONDS else None

    def look(self, now: float) -> ControllerAddress | Exception | None:
        """The controller to join instead, or why the role must end, if it must."""
        if now - self._asked > _ASLEEP_SECONDS:
            self._heard = now
        self._asked = now
        silent = now - self._heard
        suspect = self.neighbour if silent > _SILENT_SECONDS else None
        died = suspect is not None and not process_is_alive(suspect)
        if not died and silent <= min(_LOOK_SECONDS, self._heartbeat):
            return None
        if self.patience:
            self._sign.show(now)
        gone, limit = died or silent > self._heartbeat, max(self._heartbeat, self.patience)
        if gone and self.ends_at is not None and now > self.ends_at:
            return StopReceived("it was told to end, and there is no controller")
        if gone and (not self.patience or silent > limit):
            return self._loss(died, limit)
        if not self.patience or now - self._read_at < _BETWEEN_LOOKS_SECONDS:
            return None
        self._read_at = now
        if gone and not self.detached:
            self.detached = True
            how = f"(pid {self.neighbour}) has died" if died else f"has been silent for {silent:.0f} s"
            text = "the controller %s; this %s goes on, and waits up to %.0f s for it or another"
            log.warning(text, how, self._hello.role, self.patience)
        return self._another()

    def _another(self) -> ControllerAddress | Exception | None:
        try:
            address, known = read_address(self._run_dir), self._address
        except OSError as error:  # the file system has failed as well; it is asked again
            log.warning("no controller can be looked for in %s: %s", self._run_dir, error)
            return None
        if address is None or known is None or address.run_id == known.run_id or not address.store_id:
            return None
        if self.store_id not in ("", address.store_id):
            return LaminarError(
                f"the controller at {address.host}:{address.port} has store {address.store_id}, and this "
                f"{self._hello.role} works for store {self.store_id}: it does not join another run"
            )
        log.warning("joining the controller at %s:%d", address.host, address.port)
        self.detached = True
        return address

    def _loss(self, died: bool, limit: float) -> Exception:
        if died and orders().one_terminal:
            return StopReceived(RUN_FAILED)  # who started the controller says how it died
        how = f"(pid {self.neighbour}) has died" if died else f"has been silent for {limit:.0f} s"
        log_file, cure = self._run_dir / "logs" / "controller0.log", "the same command and resume=auto"
        if has_joined(self._run_dir):
            return ControllerLost(f"the controller {how}: if its run goes on, join it again")
        return ControllerLost(f"the controller {how}; see {log_file}, then go on with {cure}")
