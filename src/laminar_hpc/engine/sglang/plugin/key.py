"""The API key of an engine's server: in a file that only this user can read, and gone with its first
reading."""

import os
from pathlib import Path

FILE_VARIABLE = "LAMINAR_ENGINE_KEY_FILE"


class Key(str):
    """A text that logs show as stars; SGLang logs all of its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def leave(folder: Path, key: str) -> str:
    """Writes the key for the server that is about to start; returns the path, for FILE_VARIABLE."""
    path = folder / "key"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return str(path)


def take() -> Key | None:
    """The key of this server, once; None where nobody has left one."""
    path = os.environ.pop(FILE_VARIABLE, "")
    if not path:
        return None
    key = Key(Path(path).read_text())
    os.unlink(path)
    return key
