"""Where a replica's complete responses go: into the run directory that all roles see, or with
cluster.storage=stream through a folder of its own to the controller's side."""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.machine.files.folders import PAYLOADS_FOLDER_PREFIX, claim
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.store.payload.reader import read
from laminar_hpc.store.payload.upload import PayloadUploader
from laminar_hpc.store.payload.writer import PayloadWriter

Wanted = Sequence[tuple[int, ResponsePlace]]


class Payloads(Protocol):
    """PayloadWriter or PayloadUploader."""

    def append(self, record: bytes, behind: bytes = b"") -> "Future[ResponsePlace]": ...
    def close(self) -> None: ...


def open_payloads(
    context: RoleContext, patience: float
) -> tuple[Payloads, Callable[[Wanted], list[Response]]]:
    """Where responses are put, and what reads those that others have put. `patience`: seconds for room on a
    full disk of the run directory. A line may be cut for cluster.join_timeout_seconds. Raises LaminarError.
    """
    name = f"rollout{context.index}"
    if context.config.cluster.storage == "shared":
        return PayloadWriter(context.run_dir, name, patience), partial(read, context.run_dir)
    folder = Path(tempfile.mkdtemp(prefix=PAYLOADS_FOLDER_PREFIX))
    claim(folder)
    limit = context.config.cluster.join_timeout_seconds
    uploader = PayloadUploader(context.run_dir, folder, name, limit)
    return uploader, uploader.read
