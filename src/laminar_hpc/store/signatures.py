"""Whose checkpoint it is: `signature.json` in it holds an HMAC-SHA256 over its list of files.

Torch's metadata in a checkpoint is unpickled, so loading one may run what its writer wanted. It is loaded
only if the run's key has signed it. The key is RUN_DIR/checkpoint.key, made with the first checkpoint, or the
file that `checkpoint.key` names. Imports no torch.
"""

import hashlib
import hmac
import json
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.files.secret_file import MAKE_ONE, make_secret, read_secret
from laminar_hpc.store import checkpoints
from laminar_hpc.store.checkpoints import LIST_FILE, SIGNATURE_FILE, DamagedCheckpoint

KEY_FILE = "checkpoint.key"
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
        raise Refused([f"checkpoint.key={path} is missing: {MAKE_ONE}"])
    make_secret(path)
    return own_key(config, run_dir)


def read_key(path: Path) -> SigningKey | None:
    """None where there is none. Raises LaminarError for a file that is no key, or that others than its
    owner may read or have written."""
    secret = read_secret(path, "the key of checkpoints")
    return None if secret is None else SigningKey(secret)


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
