"""What the controller's side does for rollouts that see no run directory (cluster.storage=stream): it takes
their responses, gives them those of others to score, says where the controller is, and lets machines join,
whose traces it takes and whose logs it asks for (controller/joined_files.py).

Called in the thread of line/bulk_server.py, beside the loop, with which it shares nothing but files. A run
has one key for all of it (line/join_key.py), from its start to its end.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar_hpc import __version__
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import dump_config
from laminar_hpc.config.models import INDEX_FILE, SIDE_FILES
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.system_schema import RANKS_MAX
from laminar_hpc.controller.joined_files import JoinedFiles
from laminar_hpc.controller.loop import Controller
from laminar_hpc.data.pretrained import recorded_name
from laminar_hpc.line.address import ControllerAddress
from laminar_hpc.line.bulk_server import BulkAnswer, BulkServer
from laminar_hpc.line.join_key import (
    JOIN_FILE,
    SECRET_FILE,
    JoinKey,
    forget_keys,
    new_join_key,
    read_join_key,
    write_join_key,
)
from laminar_hpc.line.messages.bulk import (
    AppendBytes,
    AskController,
    AskStored,
    AskToJoin,
    BytesRead,
    ControllerIs,
    JoinGranted,
    ReadBytes,
    Request,
)
from laminar_hpc.machine.files import durable
from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.machine.observability import console
from laminar_hpc.store import status
from laminar_hpc.store.payload.receiver import PayloadReceiver, read_at

_COUNT_FILE = "join.count"  # in the run directory: machines that have joined so far


class BulkDoor:
    """Open from its construction to `close`. `address`: the controller's; `slots`: as in Welcome."""

    def __init__(self, config: RunConfig, store_id: str, address: ControllerAddress, slots: str) -> None:
        self._config = config
        self._slots = slots
        self._run_dir = Path(config.run_dir)
        self._address = address
        self._receiver = PayloadReceiver(self._run_dir)
        self._joined = JoinedFiles(self._run_dir)
        self.key, secret = _keys(config, store_id)
        self._server = BulkServer(self.key, secret, config.cluster.join_port, self)
        write_whole(self._run_dir / SECRET_FILE, secret, mode=0o600)
        write_join_key(self._run_dir / JOIN_FILE, self.key)

    def handle(self, identity: str, request: Request, body: bytes) -> BulkAnswer | None:
        """See BulkHandler."""
        if isinstance(request, AppendBytes):
            self._receiver.append(identity, request, body)
            return None
        if isinstance(request, AskStored):
            self._receiver.ask(identity, request)
            return None
        if isinstance(request, ReadBytes):
            return BytesRead(), self._read(request)
        if isinstance(request, AskController):
            self._joined.heard(identity, request.rollout)
            return ControllerIs(self._address), b""
        if isinstance(request, AskToJoin):
            return self._joins(request), b""
        return self._joined.handle(identity, request, body)

    def settle(self) -> Iterable[tuple[str, BulkAnswer]]:
        """See BulkHandler."""
        stored = [(identity, (reply, b"")) for identity, reply in self._receiver.settle()]
        return [*stored, *self._joined.settle()]

    def close(self, is_over: bool) -> None:
        """`is_over`: there is no next controller, and the key opens nothing any more."""
        self._server.close()
        self._receiver.close()
        if is_over:
            forget_keys(self._run_dir)

    def _read(self, request: ReadBytes) -> bytes:
        if not request.model:
            return self._receiver.read(request)
        if request.file not in self._model_files():
            raise LaminarError(f"{request.file!r} is no file of the run's model")
        return read_at(Path(self._config.model.path) / request.file, request)

    def _joins(self, request: AskToJoin) -> JoinGranted:
        if request.version != __version__:
            raise LaminarError(
                f"laminar {request.version} is installed here, and the run is of {__version__}"
            )
        if self._config.role == "all":
            raise LaminarError(
                "the run's roles are in one world, which nobody can join: start it with launch/all_roles.sh "
                "or laminar launch"
            )
        name = recorded_name(self._config.model.path)
        files = {} if name else self._model_files()
        relays = self._relays()
        machine = -1 if relays is None else self._next_machine()
        written = dump_config(self._config)
        return JoinGranted(written, self._address, str(name or ""), files, self._slots, relays, machine)

    def _relays(self) -> list[str] | None:
        """Their machines, by what the controller has last written; None before the trainers have joined."""
        shown = status.read(self._run_dir)
        if shown is None or shown.pid != os.getpid() or not any(r.role == "trainer" for r in shown.ranks):
            return None
        return [rank.machine for rank in shown.ranks if rank.role == "relay"]

    def _next_machine(self) -> int:
        """From the end: the run's own machines have the lowest numbers (launch/slurm/machine_number.py)."""
        file, lanes = self._run_dir / _COUNT_FILE, max(1, self._config.relay.lanes)
        count = int(file.read_text()) if file.exists() else 0
        durable.replace(file, str(count + 1).encode())
        return RANKS_MAX // lanes - 1 - count

    def _model_files(self) -> dict[str, int]:
        """Those that an engine needs, with their sizes."""
        folder = Path(self._config.model.path)
        found = [
            *(folder / name for name in (*SIDE_FILES, INDEX_FILE)),
            *sorted(folder.glob("*.safetensors")),
        ]
        return {str(path.relative_to(folder)): path.stat().st_size for path in found if path.is_file()}


def _keys(config: RunConfig, store_id: str) -> tuple[JoinKey, str]:
    """Those of the run where it goes on after its controller, else new ones."""
    run_dir = Path(config.run_dir)
    try:
        key, secret = read_join_key(run_dir / JOIN_FILE), (run_dir / SECRET_FILE).read_text()
    except (LaminarError, OSError):
        return new_join_key(store_id, config.cluster.host)
    if config.role == "all" or key.store_id != store_id:
        return new_join_key(store_id, config.cluster.host)
    key.host = config.cluster.host
    return key, secret


@contextmanager
def bulk_door(
    controller: Controller, say: Callable[[str], None], is_over: Callable[[], bool]
) -> Iterator[None]:
    """With cluster.storage=stream it is open inside; otherwise the keys of an earlier start open nothing any
    more. `is_over`: as in `BulkDoor.close`."""
    config = controller.config
    if config.cluster.storage == "shared":
        forget_keys(Path(config.run_dir))
        yield
        return
    door = BulkDoor(config, controller.store.store_id, controller.hub.address, controller.slots)
    if config.role != "all":
        say(console.line("join", f"laminar join {door.key.place} --key {Path(config.run_dir) / JOIN_FILE}"))
    try:
        yield
    finally:
        door.close(is_over())
