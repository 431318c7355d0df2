"""The slots of a machine: a few Hugging Face directories in shared memory, written by the relay and read by
the rollouts beside it.

A slot's file is allocated once and mapped by the relay, which receives into it. Reader and writer meet on a
file lock only: a reader holds it shared during a load, the writer rewrites a slot only under an exclusive
lock that it gets without waiting. A slot is complete when its manifest is there (removed before the first
byte is written, renamed into place after the last); the kernel frees a dead reader's lock.

    <shm_dir>/laminar-<run_id>/slot0/{model.safetensors, config.json, tokenizer..., manifest.json, lock}
                          of adapters {adapter_model.safetensors, adapter_config.json, manifest.json, lock}
"""

import contextlib
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import SIDE_FILES, WEIGHTS_FILE
from laminar_hpc.machine.files.folders import claim, is_mine, remove_dead_slots, slots_root
from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.machine.locks.holder import HeldByAnother, hold
from laminar_hpc.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    decode_manifest,
    encode_manifest,
    safetensors_header,
    weight_id_of,
)

LOCK_FILE = "lock"
_END_SECONDS = 5.0  # in which a relay that was killed has ended


class SlotGone(Exception):
    """The slot was rewritten between the look and the lease; look again."""


class SlotsBusy(LaminarError):
    """No slot can be taken now."""


@dataclass(frozen=True)
class SlotHandle:
    """A complete slot as it was when looked at."""

    weight_id: int
    step: int
    directory: Path
    manifest: Manifest


def _handle(text: bytes, directory: Path) -> SlotHandle:
    manifest = decode_manifest(text)
    return SlotHandle(manifest.weight_id, manifest.step, directory, manifest)


def by_age(weight_id: int | None) -> tuple[bool, int]:
    """Sorts slots: those without weights first, then from the oldest weights to the newest."""
    return weight_id is not None, weight_id or 0


class SlotReader:
    """A rollout's view of its machine's slots."""

    def __init__(self, shm_dir: str, run_id: str) -> None:
        self.root = slots_root(shm_dir, run_id)

    def _complete(self) -> list[tuple[int, bytes, Path]]:
        """Weight id, manifest and folder of each complete slot."""
        found = []
        for path in self.root.glob(f"slot*/{MANIFEST_FILE}"):
            with contextlib.suppress(FileNotFoundError):  # taken away between glob and read
                text = path.read_bytes()
                found.append((weight_id_of(text), text, path.parent))
        return found

    def newest_id(self) -> int | None:
        """The highest weight id of a complete slot, or None."""
        return max((found for found, _, _ in self._complete()), default=None)

    def newest(self) -> SlotHandle | None:
        """The complete slot with the highest weight id, or None."""
        found = max(self._complete(), key=lambda each: each[0], default=None)
        return None if found is None else _handle(found[1], found[2])

    def find(self, weight_id: int) -> SlotHandle:
        """The complete slot with these weights. Raises SlotGone where there is none."""
        for found, text, directory in self._complete():
            if found == weight_id:
                return _handle(text, directory)
        raise SlotGone(f"weight id {weight_id} is in no slot under {self.root}")

    @contextlib.contextmanager
    def lease(self, handle: SlotHandle) -> Iterator[None]:
        """Keeps the slot from being rewritten while it is loaded. Raises SlotGone when it holds another id by
        now."""
        try:
            descriptor = os.open(handle.directory / LOCK_FILE, os.O_RDWR)
        except FileNotFoundError:
            raise SlotGone(f"{handle.directory} is gone") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                now = weight_id_of((handle.directory / MANIFEST_FILE).read_bytes())
            except (BlockingIOError, FileNotFoundError):
                raise SlotGone(f"{handle.directory} is being rewritten") from None
            if now != handle.weight_id:
                raise SlotGone(f"{handle.directory} holds weight id {now} by now")
            yield
        finally:
            os.close(descriptor)


def _is_usable(file: Path, header: bytes, size: int) -> bool:
    """There is a slot for weights of this layout, all of it."""
    if not (file.parent / LOCK_FILE).exists():
        return False
    try:
        with open(file, "rb") as there:
            return os.fstat(there.fileno()).st_size == size and there.read(len(header)) == header
    except FileNotFoundError:  # whoever removed it was killed before it had removed the lock
        return False


class SlotWriter:
    """A relay's side: owns the folder of its machine, hands out one slot at a time to be written. `side`:
    contents of the files beside the weights, by name; those of `model_dir` where it is None.

    Raises LaminarError where another process writes these slots: each would void what the other has written.
    """

    writer_file = "writer"  # which one process holds

    def __init__(
        self, shm_dir: str, run_id: str, slots: int, model_dir: Path, side: dict[str, bytes] | None = None
    ) -> None:
        self.root = slots_root(shm_dir, run_id)
        self.model_dir = model_dir
        self.count = slots
        self._side = side
        self._file = WEIGHTS_FILE  # as the manifests name it
        self._maps: dict[int, tuple[mmap.mmap, np.ndarray]] = {}
        self._held: tuple[int, int] | None = None  # (slot, lock descriptor) of the slot being written
        self._kept: list[int] = []  # slots that the relay itself still sends from
        self._lock = threading.Lock()
        try:
            self._alone: int | None = hold(self.root / self.writer_file, _END_SECONDS)
        except HeldByAnother as other:
            raise LaminarError(
                f"another relay of this run ({other}) writes the weight slots under {self.root}: one serves "
                "all rollouts of a machine; start no second one there"
            ) from None
        self._make_root(shm_dir)

    def _make_root(self, shm_dir: str) -> None:
        """Slots of an earlier relay of this run hold nothing from now on, but who still loads from one goes
        on."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        claim(self.root)  # before the cleaning, which takes it for the dead relay's
        remove_dead_slots(shm_dir)
        self._void(MANIFEST_FILE)

    def _void(self, *patterns: str) -> None:
        """Of slots that others left: those that are over go, of the rest what matches."""
        for directory in self.root.glob("slot*"):
            if int(directory.name.removeprefix("slot")) >= self.count:
                shutil.rmtree(directory)
        for pattern in patterns:
            for path in self.root.glob(f"slot*/{pattern}"):
                path.unlink(missing_ok=True)

    def _allocate(self, index: int, manifest: Manifest) -> np.ndarray:
        """The slot's data bytes, mapped; all its pages are taken at the first use, so that memory cannot run
        out later."""
        if index not in self._maps:
            self._file = manifest.file
            directory, header = self.root / f"slot{index}", safetensors_header(manifest)
            if not _is_usable(directory / self._file, header, len(header) + manifest.data_bytes):
                self._create(directory, header, len(header) + manifest.data_bytes)
            for name, content in self._side_files():  # also beside what an earlier relay, of other ones, left
                (directory / name).parent.mkdir(exist_ok=True)
                write_whole(directory / name, content)
            with open(directory / self._file, "r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
            self._maps[index] = (mapping, np.frombuffer(mapping, dtype=np.uint8, offset=len(header)))
        return self._maps[index][1]

    def _side_files(self) -> Iterator[tuple[str, bytes]]:
        if self._side is not None:
            yield from self._side.items()
            return
        for name in SIDE_FILES:
            if (self.model_dir / name).exists():
                yield name, (self.model_dir / name).read_bytes()

    def _create(self, directory: Path, header: bytes, size: int) -> None:
        """Makes the slot's files, the lock last."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        with open(directory / self._file, "w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                raise LaminarError(
                    f"{self.root.parent} has no room for one of {self.count} weight slots "
                    f"({size / 1e6:.0f} MB each): give it {self.count * size / 1e9:.1f} "
                    "GB (containers: --shm-size) or set relay.shm_dir"
                ) from None
            file.write(header)
        (directory / LOCK_FILE).touch(mode=0o600)

    def begin(self, manifest: Manifest) -> np.ndarray:
        """Takes a slot that nobody reads and that is not the newest one; returns its data bytes (uint8,
        `manifest.data_bytes` long) to be filled.

        Raises SlotsBusy while readers hold all of them (more readers than slots, each on another id).
        """
        with self._lock:
            return self._begin(manifest)

    def _begin(self, manifest: Manifest) -> np.ndarray:
        ids = {i: self._weight_id(i) for i in range(self.count)}
        newest = max(ids, key=lambda i: by_age(ids[i]))
        for index in sorted(ids, key=lambda i: by_age(ids[i])):
            if index in self._kept or (index == newest and ids[index] is not None and self.count > 1):
                continue
            data = self._allocate(index, manifest)
            descriptor = os.open(self.root / f"slot{index}" / LOCK_FILE, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            (self.root / f"slot{index}" / MANIFEST_FILE).unlink(missing_ok=True)
            self._held = (index, descriptor)
            return data
        raise SlotsBusy(f"all {self.count} weight slots under {self.root} are being read; raise relay.slots")

    def _manifest(self, index: int, file: str = MANIFEST_FILE) -> Manifest | None:
        try:
            return decode_manifest((self.root / f"slot{index}" / file).read_bytes())
        except FileNotFoundError:
            return None

    def _weight_id(self, index: int) -> int | None:
        try:
            return weight_id_of((self.root / f"slot{index}" / MANIFEST_FILE).read_bytes())
        except FileNotFoundError:
            return None

    def removed(self) -> Path | None:
        """What somebody has taken away of the slots; None while all is there."""
        files = [self.root, *(self.root / f"slot{index}" / self._file for index in tuple(self._maps))]
        return next((path for path in files if not path.exists()), None)

    def keep_held(self) -> int:
        """The slot being written, which from now on is not rewritten before it is released as often as it was
        kept."""
        assert self._held is not None
        with self._lock:
            self._kept.append(self._held[0])
        return self._held[0]

    def newest_id(self) -> int | None:
        """The highest weight id of a complete one, or None."""
        with self._lock:
            ids = (self._weight_id(index) for index in self._maps)
            return max((each for each in ids if each is not None), default=None)

    def keep_newest(self) -> tuple[int, Manifest, np.ndarray] | None:
        """(slot, manifest, data bytes) of the newest complete one, kept like that; None where there is
        none."""
        with self._lock:
            complete = [
                (manifest.weight_id, index, manifest)
                for index in self._maps
                if (manifest := self._manifest(index)) is not None
            ]
            if not complete:
                return None
            _, index, manifest = max(complete, key=lambda each: each[0])
            self._kept.append(index)
            return index, manifest, self._maps[index][1]

    def keep(self, weight_id: int) -> tuple[int, np.ndarray] | None:
        """(slot, data bytes) of the complete one with these weights, kept like that; None where there is
        none."""
        with self._lock:
            index = next((index for index in self._maps if self._weight_id(index) == weight_id), None)
            if index is None:
                return None
            self._kept.append(index)
            return index, self._maps[index][1]

    def release(self, index: int) -> None:
        with self._lock:
            self._kept.remove(index)

    def is_complete(self, index: int) -> bool:
        """Whether readers see this slot."""
        return self._manifest(index) is not None

    def commit(self, manifest: Manifest) -> Path | None:
        """The slot is complete: readers may see it from here on. Returns its folder."""
        assert self._held is not None
        index = self._held[0]
        directory = self.root / f"slot{index}"
        write_whole(directory / MANIFEST_FILE, encode_manifest(manifest))
        self.abandon()
        return directory

    def abandon(self) -> None:
        """Lets go of the slot being written; without a manifest nobody sees it."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None

    def close(self) -> None:
        """Removes the slots, unless another relay has taken them over."""
        self.abandon()
        if is_mine(self.root):
            shutil.rmtree(self.root, ignore_errors=True)
        self._let_others_write()

    def _let_others_write(self) -> None:
        if self._alone is not None:
            os.close(self._alone)
            self._alone = None
