"""Whose checkpoint it is: `signature.json` in it holds an HMAC-SHA256 over its list of files.

Torch's metadata in a checkpoint is unpickled, so loading one may run what its writer wanted. It is loaded
only if the run's key has signed it. The key is RUN_DIR/checkpoint.key, made with the first checkpoint, or the
file that `checkpoint.key` names. Imports no torch.
"""

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.files import durable
from laminar_hpc.store import checkpoints
from laminar_hpc.store.checkpoints import LIST_FILE, SIGNATURE_FILE, DamagedCheckpoint

KEY_FILE = "checkpoint.key"
_LENGTH_MIN = 32  # characters of a key
_MAKE_ONE = "make one: (umask 077; openssl rand -hex 32 > FILE)"
_TRUST = (
    "name the key of the run that wrote it (checkpoint.key=FILE), or say checkpoint.unsigned=true if nobody "
    "else could write there, as loading it may run what its writer wanted"
)


class SigningKey:
    """A secret text; `name` tells it from others and does not give it away."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.name = hashlib.sha256(b"name of a checkpoint key\n" + secret).hexdigest()[:16]

    def sign(self, files: bytes) -> bytes:
        """The content of signature.json for this content of files.json."""
        return json.dumps({"key": self.name, "hmac": self._digest(files)}).encode()

    def has_signed(self, files: bytes, digest: str) -> bool:
        return hmac.compare_digest(self._digest(files).encode(), digest.encode())

    def _digest(self, files: bytes) -> str:
        return hmac.new(self._secret, b"files of a checkpoint\n" + files, "sha256").hexdigest()


def key_path(config: RunConfig, run_dir: Path) -> Path:
    return Path(config.checkpoint.key or run_dir / KEY_FILE)


def own_key(config: RunConfig, run_dir: Path) -> SigningKey:
    """The key that signs this run's checkpoints, made if missing. Raises LaminarError for a wrong one."""
    path = key_path(config, run_dir)
    if key := read_key(path):
        return key
    if config.checkpoint.key:
        raise Refused([f"checkpoint.key={path} is missing: {_MAKE_ONE}"])
    new = path.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    with open(_private(new), "wb") as file:
        file.write(secrets.token_hex(32).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, path)
    except FileExistsError:  # another trainer generation's, which has signed with it
        pass
    except OSError:  # a file system without links
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
    durable.sync_folder(path.parent)
    return own_key(config, run_dir)


def read_key(path: Path) -> SigningKey | None:
    """None where there is none. Raises LaminarError for a file that is no key, or that others than its
    owner may read or have written."""
    try:
        secret = path.read_bytes().strip()
        secret_kept = _is_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused([f"{path}, the key of checkpoints, cannot be read ({error.strerror})"]) from None
    if not secret_kept:
        raise Refused(
            [
                f"{path}, the key of checkpoints, belongs to another user or others may read it: if it is "
                f"yours, chown and chmod 600 it"
            ]
        )
    if len(secret) < _LENGTH_MIN:
        raise Refused([f"{path} is no key: it has less than {_LENGTH_MIN} characters; {_MAKE_ONE}"])
    return SigningKey(secret)


def _private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _is_private(path: Path) -> bool:
    """Whether it is as a file that we make ourselves: some file systems give all the same owner and mode."""
    found = path.stat()
    if found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o077:
        return True
    probe = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with suppress(OSError):
        try:
            os.close(_private(probe))
            ours = probe.stat()
        finally:
            probe.unlink(missing_ok=True)
        return found.st_uid == ours.st_uid and not found.st_mode & 0o077 & ~ours.st_mode
    return False


def objection(config: RunConfig, run_dir: Path, checkpoint: Path) -> str:
    """Why this checkpoint is not the run's own, with the cure; "" if its key has signed the list of files as
    it is, or checkpoint.unsigned=true. Raises DamagedCheckpoint where the key has signed another list,
    LaminarError for a key that is none."""
    if config.checkpoint.unsigned:
        return ""
    path = key_path(config, run_dir)
    if (content := _content(checkpoint, SIGNATURE_FILE)) is None:
        return f"{checkpoint} is not signed: {_TRUST}"
    signer, digest = _parsed(content)
    key = read_key(path)
    if key is None:
        return f"{checkpoint} is signed, and its key {path} is missing: {_TRUST}"
    if signer != key.name:
        return f"{checkpoint} is signed with another key than {path}: {_TRUST}"
    if (files := _content(checkpoint, LIST_FILE)) is None:
        raise DamagedCheckpoint(f"{LIST_FILE} is missing")
    if not key.has_signed(files, digest):
        raise DamagedCheckpoint(f"{LIST_FILE} has changed since it was signed")
    return ""


def _content(checkpoint: Path, name: str) -> bytes | None:
    try:
        return (checkpoint / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read ({error.strerror})") from None


def _parsed(content: bytes) -> tuple[str, str]:
    try:
        found = json.loads(content)
        return str(found["key"]), str(found["hmac"])
    except (ValueError, TypeError, KeyError):
        raise DamagedCheckpoint(f"{SIGNATURE_FILE} is no signature") from None


def refuse_foreign(config: RunConfig) -> None:
    """For a command line, before anything starts: raises Refused when the newest checkpoint, from which a run
    would go on, is not the run's own."""
    run_dir = Path(config.run_dir)
    newest = max(checkpoints.steps(run_dir), default=None) if config.resume == "auto" else None
    if newest is not None:
        with suppress(DamagedCheckpoint):  # the trainers pass it over
            if text := objection(config, run_dir, checkpoints.checkpoint_path(run_dir, newest)):
                raise Refused([text])
    elif config.checkpoint.key:
        own_key(config, run_dir)
