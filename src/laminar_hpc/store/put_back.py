"""Archived responses in payload files again: where a restore goes behind the archive, and where a replay
trains a step that is in it. The loop waits for the disk meanwhile; trainers wait with it."""

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.store.archive import files
from laminar_hpc.store.payload.layout import DamagedResponse, pack, packed_digest
from laminar_hpc.store.payload.whole import Whole
from laminar_hpc.store.payload.writer import PayloadWriter

WRITER = "archive0"  # the name of its payload files
_PUT_SECONDS = 300.0  # for the disk to take a part
_AT_ONCE = 256  # responses of a part


def put_back(writer: PayloadWriter, path: Path) -> Iterator[tuple[Whole, ResponsePlace]]:
    """The responses of an archive's file, each with its new place, on the disk. Raises LaminarError where the
    file cannot be read, does not hold what was generated, or cannot be written into payload files."""
    packed = _packed(path)
    while part := list(islice(packed, _AT_ONCE)):
        written = [writer.append(record) for _, record in part]
        for (whole, _), place in zip(part, written, strict=True):
            yield whole, _result(place, path)


def _result(place: "Future[ResponsePlace]", path: Path) -> ResponsePlace:
    try:
        return place.result(_PUT_SECONDS)
    except OSError as error:
        why = str(error) or f"not done after {_PUT_SECONDS:.0f} s"
        text = f"what {path.name} has of the archive cannot be written into payload files ({why})"
        raise LaminarError(f"{text}; look at the disk of run_dir") from error


def _packed(path: Path) -> Iterator[tuple[Whole, bytes]]:
    try:
        for whole in files.read(path):
            record = pack(whole.response)
            if packed_digest(record) != whole.record.digest:
                raise DamagedResponse(f"trajectory {whole.record.trajectory_id} does not have its digest")
            yield whole, record
    except (OSError, DamagedResponse) as error:
        raise LaminarError(f"{path} cannot be read ({error}); bring it back from a copy") from None


def batch_of(writer: PayloadWriter, path: Path) -> list[BatchGroup]:
    """The groups of an archive's file, as a batch names them; none where there is no such file."""
    groups: dict[int, BatchGroup] = {}
    for whole, place in put_back(writer, path) if path.exists() else ():
        record = whole.record
        record.place = place
        prompt = whole.prompt.tobytes()
        group = groups.setdefault(record.group_id, BatchGroup(record.group_id, prompt, []))
        group.trajectories.append(record)
    return list(groups.values())
