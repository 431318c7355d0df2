"""On PYTHONPATH of the roles of bench/cuts.py: this process counts the numbered messages that it says and
takes, over all its streams, in a file of the folder COUNTED."""

import mmap
import os
import struct
import sys
from pathlib import Path
from types import ModuleType

_ROLE = next((word[5:] for word in sys.orig_argv if word.startswith("role=")), "")


class Counts:
    """Two numbers in a file that outlives the process: said and taken. Made at the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, None
        self._numbers = [0, 0]

    def add(self, which: int) -> None:
        if self._file is None:
            path = self._folder / f"{_ROLE}.{os.getpid()}.count"
            path.write_bytes(bytes(16))
            with open(path, "r+b") as file:
                self._file = mmap.mmap(file.fileno(), 16)
        self._numbers[which] += 1
        struct.pack_into("<q", self._file, 8 * which, self._numbers[which])


def _wrap(module: ModuleType) -> None:
    counts = Counts(Path(os.environ["COUNTED"]))
    push, take = module.Sender.push, module.Receiver.take

    def counted_push(sender: object, frame: bytes) -> None:
        push(sender, frame)
        counts.add(0)

    def counted_take(receiver: object, number: int) -> bool:
        taken = take(receiver, number)
        if taken:
            counts.add(1)
        return taken

    module.Sender.push, module.Receiver.take = counted_push, counted_take


if _ROLE and "COUNTED" in os.environ:
    from after_import import after_import

    after_import("laminar_hpc.line.delivery", _wrap)
