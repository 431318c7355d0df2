"""Files that hold one secret text, for their owner alone: keys of checkpoints and of scrapes."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.machine.files import durable

MAKE_ONE = "make one: (umask 077; openssl rand -hex 32 > FILE)"
_LENGTH_MIN = 32  # characters


def make_secret(path: Path) -> None:
    """Writes a new secret to `path`, whole and mode 0600, unless another process has just done so."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(_private(new), "wb") as file:
        file.write(secrets.token_hex(32).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, path)
    except FileExistsError:  # another's, which is in use
        pass
    except OSError:  # a file system without links
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
    durable.sync_folder(path.parent)


def read_secret(path: Path, what: str) -> bytes | None:
    """The secret without the end of its line; None where there is no file. `what` names it to the user.
    Raises Refused for a file that is no key, or that others than its owner may read or have written."""
    try:
        secret = path.read_bytes().strip()
        secret_kept = is_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused([f"{path}, {what}, cannot be read ({error.strerror})"]) from None
    if not secret_kept:
        raise Refused(
            [
                f"{path}, {what}, belongs to another user or others may read it: if it is yours, chown and "
                "chmod 600 it"
            ]
        )
    if len(secret) < _LENGTH_MIN:
        raise Refused([f"{path} is no key: it has less than {_LENGTH_MIN} characters; {MAKE_ONE}"])
    return secret


def _private(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def is_private(path: Path) -> bool:
    """Whether it is as a file that we make ourselves: some file systems give all the same owner and mode.
    Raises OSError."""
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
