"""Names of models on the Hugging Face hub, and the folders of its cache. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.schema import RunConfig

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"(?:^|/)models--([^/]*?)--([^/]+)/snapshots/([0-9a-f]{40})$")


@dataclass(frozen=True)
class HubName:
    """A model on the hub. `revision` is a branch, a tag or a commit; empty: the default branch."""

    repo: str
    revision: str = ""

    @property
    def is_commit(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision))

    @property
    def short(self) -> str:
        """For lines that a user reads."""
        return f"{self.repo}@{self.revision[:12]}" if self.is_commit else str(self)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def parse_name(text: str) -> HubName | None:
    """OWNER/NAME[@REVISION], or None for a path: where a folder of that name is, or one called OWNER."""
    match = _NAME.fullmatch(text)
    if match is None or Path(text).exists() or Path(match["repo"]).parent.exists():
        return None
    return HubName(match["repo"], match["revision"] or "")


def recorded_name(path: str) -> HubName | None:
    """Name and commit of a hub cache's folder (.../models--OWNER--NAME/snapshots/COMMIT), else None."""
    match = _SNAPSHOT.search(str(Path(path)))
    return HubName(f"{match[1]}/{match[2]}", match[3]) if match else None


def pinned_words(loaded: RunConfig, resolved: RunConfig) -> list[str]:
    """The override that makes other processes take the same commit; none where `loaded` names a directory."""
    path = resolved.model.path
    return [] if loaded.model.path == path else [f"model.path={recorded_name(path)}"]
