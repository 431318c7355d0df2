"""The key to a run's bulk door (line/bulk_server.py): RUN_DIR/join.key, mode 0600, made by the run and
removed at its end. Whoever holds it may send responses and join the run; without it nobody is answered.

The door's own secret lies beside it in RUN_DIR/bulk.secret and goes nowhere. With roles apart both outlive
the controller, so that rollouts elsewhere find the next one at the same address.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import ControllerAddress, read_address, write_address
from laminar_hpc.machine.files.secret_file import is_private
from laminar_hpc.machine.files.whole import write_whole

JOIN_FILE = "join.key"  # in the run directory
JOINED_FILE = "joined.key"  # the copy in the folder of a machine that has joined
SECRET_FILE = "bulk.secret"


class JoinKey(msgspec.Struct):
    """Where the door is, and the CURVE keys (z85) to talk to it. `store_id`: of the run's store."""

    store_id: str
    host: str
    port: int
    server_public: str
    client_public: str
    client_secret: str

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


def new_join_key(store_id: str, host: str) -> tuple[JoinKey, str]:
    """A fresh key (port still 0) and the door's own secret."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    client = client_public.decode(), client_secret.decode()
    return JoinKey(store_id, host, 0, server_public.decode(), *client), server_secret.decode()


def write_join_key(path: Path, key: JoinKey) -> None:
    write_whole(path, msgspec.json.encode(key), mode=0o600)


def read_join_key(path: Path) -> JoinKey:
    """Raises LaminarError in one line for a file that is missing, is none, or is open to others."""
    try:
        kept = is_private(path)
        key = msgspec.json.decode(path.read_bytes(), type=JoinKey)
    except OSError as error:
        raise LaminarError(
            f"{path} cannot be read ({error.strerror}): copy RUN_DIR/{JOIN_FILE} of a run that goes on"
        ) from None
    except msgspec.DecodeError as error:
        raise LaminarError(
            f"{path} is no run's key ({error}): copy RUN_DIR/{JOIN_FILE} of a run that goes on"
        ) from None
    if not kept:
        raise LaminarError(
            f"{path} is another user's or can be read by others: chmod 600 {path}, and chown it if yours"
        )
    return key


def key_of(run_dir: Path) -> JoinKey:
    """That of the run, as a rollout finds it: in the folder of a machine that has joined, else in the run
    directory. Raises LaminarError."""
    joined = run_dir / JOINED_FILE
    return read_join_key(joined if joined.exists() else run_dir / JOIN_FILE)


def has_joined(run_dir: Path) -> bool:
    """Whether this is the folder of a machine that has joined, which sees no run directory."""
    return (run_dir / JOINED_FILE).exists()


def follow_controller(run_dir: Path, address: ControllerAddress, host: str) -> None:
    """In the folder of a machine that has joined: the controller is the one at `address`, whose machine is
    reached at `host`. Raises OSError."""
    known = read_address(run_dir)
    if known is None or known.run_id != address.run_id or known.store_id != address.store_id:
        write_address(run_dir, msgspec.structs.replace(address, host=host))


def forget_keys(folder: Path) -> None:
    """The run, or this machine's part in it, is over."""
    for name in (JOIN_FILE, JOINED_FILE, SECRET_FILE):
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
