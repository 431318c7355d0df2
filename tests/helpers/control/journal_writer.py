"""Writers of a journalled store that are killed, one after the other, in processes of their own.

    python tests/controller/journal_writer.py ROOT     reads numbers from its input, one a line, and begins a
                                                       writer at each; says which process that is, each
                                                       transaction when it is committed, and when it is dead

They are forked by a process without threads: pytest's has some, whose locks a fork would copy.
"""

import os
import select
import subprocess
import sys
from pathlib import Path

from helpers.control.journals import Place, transaction
from helpers.paths import environment
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.store import journal


class Writers:
    """The other end of it, for a test."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment(),
        )
        self._rest = b""

    def begin(self, first: int) -> int:
        """The pid of a writer of transactions from `first` on, which has committed one."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % first)
        begun, pid = self._line().split()
        committed = self._line()
        assert begun == "begun" and int(committed) == first
        return int(pid)

    def acknowledged(self) -> int:
        """The last transaction that the dead writer has acknowledged after its first; -1: there is none."""
        last = -1
        while (line := self._line()) != "ended":
            last = int(line)
        return last

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self, seconds: float = 20.0) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], seconds)
            assert ready, f"the writer said nothing for {seconds:g} s"
            more = self._process.stdout.read(1 << 16)
            assert more, "the writers' parent has died"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


def write(root: Path, first: int) -> None:
    """Until it is killed; with small segments and snapshots."""
    die_with_parent()
    journal._SEGMENT_BYTES, journal._SNAPSHOT_BYTES = 4_000, 12_000
    store = Place(root).start()
    for number in range(first, 1_000_000):
        transaction(store, number)
        os.write(1, b"%d\n" % number)


def main(root: Path) -> None:
    die_with_parent()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.write(1, b"begun %d\n" % os.getpid())
            try:
                write(root, int(line))
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
