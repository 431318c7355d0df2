"""The slots of a machine that several relays fill together, each with the bytes of its lane.

The relays are equal and need not know each other: whoever first brings a weight id takes a slot for it, the
others join, and whoever finds all parts complete writes the manifest. Who writes to a slot or sends from it
holds its lock shared, as readers do; a slot is taken for a new id only with the lock exclusive. Such
decisions are made one at a time, under the machine's `turn`. All locks are freed by the kernel with their
holder, so a relay that dies leaves at most a slot without a manifest, which nobody sees and the next id may
take.

    slot0/writing                   the id that it is for
    slot0/lane0.json, lane1.json    manifests of the parts that are complete
    turn, present                   of all slots
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.files.folders import claim, remove_dead_slots
from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.weights.lanes import join
from laminar_hpc.weights.manifest import MANIFEST_FILE, Manifest, encode_manifest
from laminar_hpc.weights.slots import LOCK_FILE, SlotsBusy, SlotWriter, by_age

_TURN_SECONDS = 60.0
_TAKEN_PER_SECOND = 0.5e9  # bytes, and more: the first turn of a slot takes its memory
_POLL_SECONDS = 0.005
_WRITING_FILE = "writing"


class LaneWriter(SlotWriter):
    """One relay's side: as SlotWriter for the manifests of lane `lane`. All `lanes` relays of a machine use
    the same folder."""

    def __init__(
        self,
        shm_dir: str,
        run_id: str,
        slots: int,
        model_dir: Path,
        lane: int,
        lanes: int,
        side: dict[str, bytes] | None = None,
    ) -> None:
        self._lanes = lanes
        self._part = f"lane{lane}.json"
        self.writer_file = f"writer{lane}"
        self._sent_from: dict[int, list[int]] = {}  # slot -> lock descriptors
        self._turn_seconds = _TURN_SECONDS  # the longest turn of another relay
        super().__init__(shm_dir, run_id, slots, model_dir, side)

    def _make_root(self, shm_dir: str) -> None:
        """Slots that are there stay if another relay of this machine lives."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._turn():
            self._present = os.open(self.root / "present", os.O_RDWR | os.O_CREAT, 0o600)
            if _locked(self._present, fcntl.LOCK_EX):
                self._void(MANIFEST_FILE, "lane*.json", _WRITING_FILE)
            _locked(self._present, fcntl.LOCK_SH)
            claim(self.root)
        remove_dead_slots(shm_dir)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone among the relays of this machine. Raises LaminarError when another one keeps its turn too
        long."""
        descriptor, until = (
            os.open(self.root / "turn", os.O_RDWR | os.O_CREAT, 0o600),
            time.monotonic() + self._turn_seconds,
        )
        try:
            while not _locked(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise LaminarError(
                        "another relay of this machine has kept "
                        f"{self.root}/turn for {self._turn_seconds:.0f} s; see its log"
                    )
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    # ---- what is there -------------------------------------------------------------------------------------

    def _writing(self, index: int) -> int | None:
        """The id that the slot was last taken for."""
        try:
            return int((self.root / f"slot{index}" / _WRITING_FILE).read_bytes())
        except FileNotFoundError:
            return None

    def _locked_slot(self, index: int, how: int) -> int | None:
        """A descriptor that holds the slot's lock, or None at once."""
        descriptor = os.open(self.root / f"slot{index}" / LOCK_FILE, os.O_RDWR)
        if _locked(descriptor, how):
            return descriptor
        os.close(descriptor)
        return None

    # ---- writing -------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> np.ndarray:
        """A slot for this id; returns the bytes of the lane in it, `manifest.data_bytes` long. Raises
        SlotsBusy.

        No slot of a newer id is taken, and not the newest complete one.
        """
        whole = manifest.whole or manifest
        self._turn_seconds = _TURN_SECONDS + whole.data_bytes / _TAKEN_PER_SECOND
        with self._turn():
            claim(self.root)  # the folder belongs to whoever lives
            index, descriptor = self._taken(manifest.weight_id, whole)
            data = self._allocate(index, whole)
            (self.root / f"slot{index}" / self._part).unlink(missing_ok=True)
            self._held = (index, descriptor)
        return data[manifest.begin : manifest.begin + manifest.data_bytes]

    def _taken(self, weight_id: int, whole: Manifest) -> tuple[int, int]:
        complete = {index: self._weight_id(index) for index in range(self.count)}
        ids = {index: max(held, self._writing(index), key=by_age) for index, held in complete.items()}
        for index, held in ids.items():
            if (
                held == weight_id != complete[index]
                and (descriptor := self._locked_slot(index, fcntl.LOCK_SH)) is not None
            ):
                return index, descriptor
        newest = max(complete, key=lambda i: by_age(complete[i]))
        for index in sorted(ids, key=lambda i: by_age(ids[i])):
            if by_age(ids[index]) >= by_age(weight_id) or (index == newest and complete[index] is not None):
                continue
            self._allocate(index, whole)
            descriptor = self._locked_slot(index, fcntl.LOCK_EX)
            if descriptor is None:
                continue
            directory = self.root / f"slot{index}"
            for path in (directory / MANIFEST_FILE, *directory.glob("lane*.json")):
                path.unlink(missing_ok=True)
            write_whole(directory / _WRITING_FILE, str(weight_id))
            _locked(descriptor, fcntl.LOCK_SH)
            return index, descriptor
        raise SlotsBusy(
            f"no weight slot under {self.root} for id {weight_id}: all {self.count} are read, sent or hold "
            "newer ones; raise relay.slots"
        )

    def commit(self, manifest: Manifest) -> Path | None:
        """The lane's part is complete. Returns the slot's folder if it is the last one, so that readers may
        see the slot from here on."""
        assert self._held is not None
        index = self._held[0]
        directory = self.root / f"slot{index}"
        with self._turn():
            write_whole(directory / self._part, encode_manifest(manifest))
            parts = [self._manifest(index, f"lane{lane}.json") for lane in range(self._lanes)]
            there = [part for part in parts if part is not None and part.weight_id == manifest.weight_id]
            if len(there) == self._lanes:
                write_whole(directory / MANIFEST_FILE, encode_manifest(join(there)))
        self.abandon()
        return directory if len(there) == self._lanes else None

    # ---- sending -------------------------------------------------------------------------------------------

    def keep_held(self) -> int:
        assert self._held is not None
        self._keep(self._held[0])
        return self._held[0]

    def keep_newest(self) -> tuple[int, Manifest, np.ndarray] | None:
        """As SlotWriter's, of the slots whose part of this lane is complete."""
        with self._turn():
            complete = [
                (part.weight_id, i, part)
                for i in range(self.count)
                if (part := self._manifest(i, self._part)) is not None
            ]
            if not complete:
                return None
            _, index, part = max(complete, key=lambda each: each[0])
            self._keep(index)
            data = self._allocate(index, part.whole or part)
        return index, part, data[part.begin : part.begin + part.data_bytes]

    def keep(self, weight_id: int) -> tuple[int, np.ndarray] | None:
        """Keeps a slot whose part of this lane is complete, as SlotWriter does."""
        with self._turn():
            for index in range(self.count):
                part = self._manifest(index, self._part)
                if part is not None and part.weight_id == weight_id:
                    self._keep(index)
                    return index, self._allocate(index, part.whole or part)[
                        part.begin : part.begin + part.data_bytes
                    ]
        return None

    def _keep(self, index: int) -> None:
        descriptor = self._locked_slot(index, fcntl.LOCK_SH)
        assert descriptor is not None, "only a relay in its turn locks a slot for itself"
        with self._lock:
            self._sent_from.setdefault(index, []).append(descriptor)

    def release(self, index: int) -> None:
        with self._lock:
            os.close(self._sent_from[index].pop())

    def close(self) -> None:
        """The last relay of a machine removes the folder."""
        self.abandon()
        with contextlib.suppress(FileNotFoundError), self._turn():
            if _locked(self._present, fcntl.LOCK_EX):
                shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._present)
        self._let_others_write()


def _locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
